import os
import pathlib

import pytest

from digen_jax import errors, files
from digen_jax.errors import ConfigError


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
    before = path.lstat()[:3]  # kind, number and device
    with pytest.raises(ConfigError):
        errors.check_output("--output", path)
    if kind != "loop":
        with pytest.raises(OSError):
            files.replace(path, b"new")
    assert path.lstat()[:3] == before
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
    errors.check_output("--image_folder", tmp_path / "to_folder", folder=True)


def test_mistakes_that_are_found_together_are_one_error_of_a_sentence_each():
    def values(**given):
        with errors.collect_errors() as one:
            for name, value in given.items():
                with one(), errors.prefix_errors("config.", (ConfigError,)):
                    errors.check_positive(name, value)

    values(a=1, b=2)
    with pytest.raises(ConfigError) as caught:
        values(a=1, b=0)
    assert str(caught.value) == "config.b must be above 0, not 0"
    with pytest.raises(ConfigError) as caught, errors.collect_errors() as one:
        with one():
            values(a=0, b=-1, c=3)
        with one():
            values(a=0)
        raise ConfigError("d is\n1")
    assert str(caught.value) == (
        "3 errors:\n  config.a must be above 0, not 0\n  config.b must be above 0, not -1\n  d is 1"
    )
