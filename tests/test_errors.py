import os
import pathlib

import pytest

from digen_jax import errors, files
from digen_jax.errors import ConfigError


def test_divides():
    errors.check_divides("config.mesh.data", 4, "config.batch", 12, "its images are sharded")
    with pytest.raises(ConfigError) as caught:
        errors.check_divides("config.mesh.data", 4, "config.batch", 10, "its images are sharded")
    assert str(caught.value) == (
        "config.mesh.data = 4 must divide config.batch = 10, its images are sharded: "
        "set config.batch to 8 or 12, or change config.mesh.data"
    )
    with pytest.raises(ConfigError, match="set b to 4, or change a"):
        errors.check_divides("a", 4, "b", 3, "why")


def test_choice_positive_and_folder(tmp_path):
    errors.check_choice("config.kind", "cps", ("cps", "flow"))
    with pytest.raises(ConfigError, match=r"'flwo'; did you mean 'flow'\? .* one of 'cps', 'flow'"):
        errors.check_choice("config.kind", "flwo", ("cps", "flow"))
    errors.check_positive("config.rate", 1e-9)
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"config\.rate must be above 0"):
            errors.check_positive("config.rate", value)
    errors.check_folder("config.model", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.model = .* is a file"):
        errors.check_folder("config.model", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"config\.model = .* is no folder"):
        errors.check_folder("config.model", str(tmp_path / "none"))


@pytest.mark.parametrize("kind", ["fifo", "/dev/null", "pipe", "loop", "link to fifo"])
def test_only_regular_files_are_written(tmp_path, kind):
    path, pipe = tmp_path / "output", os.pipe()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "link to fifo":
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo")
    else:
        path = pathlib.Path(f"/dev/fd/{pipe[1]}" if kind == "pipe" else kind)
    before = path.lstat()
    with pytest.raises(ConfigError):
        errors.check_output("--output", path)
    if kind != "loop":
        with pytest.raises(OSError):
            files.replace(path, b"new")
    assert path.lstat() == before
    for end in pipe:
        os.close(end)


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_followed_to_the_file_that_is_written(tmp_path, exists):
    link, target = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(target)
    if exists:
        target.parent.mkdir()
        target.write_text("old")
    errors.check_output("--output", link)
    files.write_output(link, b"new")
    assert link.is_symlink() and target.read_text() == "new"
    with pytest.raises(ConfigError):
        errors.check_output("--output", link, folder=True)
    (tmp_path / "to_folder").symlink_to(target.parent)
    errors.check_output("--pictures", tmp_path / "to_folder", folder=True)


def test_user_input_makes_config_errors_of_reading_and_of_nothing_else():
    with pytest.raises(ConfigError, match=r"prompts\.txt"), errors.user_input():
        pathlib.Path("/nowhere/prompts.txt").read_text()
    with pytest.raises(ZeroDivisionError), errors.user_input():
        1 / 0  # noqa: B018


def test_mistakes_that_are_found_together_are_one_error_of_a_sentence_each():
    def values(**given):
        with errors.together() as one:
            for name, value in given.items():
                with one(), errors.blame("config.", (ConfigError,)):
                    errors.check_positive(name, value)

    values(a=1, b=2)
    with pytest.raises(ConfigError) as caught:
        values(a=1, b=0)
    assert str(caught.value) == "config.b must be above 0, not 0"
    with pytest.raises(ConfigError) as caught, errors.together() as one:
        with one():
            values(a=0, b=-1, c=3)
        with one():
            values(a=0)
        raise ConfigError("d is\n1")
    assert str(caught.value) == (
        "3 things must change:\n  config.a must be above 0, not 0\n  config.b must be above 0, not -1\n  d is 1"
    )
