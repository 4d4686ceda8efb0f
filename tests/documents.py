"""The checkable parts of README and docs/: commands, fields, flags, names of files and code, links.

Every `check_...` raises a ValueError that names what does not exist or does not work.
"""

import contextlib
import functools
import importlib.util
import itertools
import pathlib
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from absl import flags
from absl.testing import flagsaver
from markdown_it import MarkdownIt
from ml_collections import ConfigDict

from digen_jax.config import command_line
from digen_jax.config.fields import check_known, flat
from digen_jax.config.load import default_config, fit_config, load_config
from digen_jax.config.sections import GIVEN
from digen_jax.config.train_config import ALGORITHMS, TrainConfig
from examples.shapes.pretrain import check_config
from tests.pipelines import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.py"))
FOLDERS = (
    "assets",
    "benchmarks",
    "configs",
    "constraints",
    "digen_jax",
    "docs",
    "examples",
    "launch",
    "notebooks",
    "tests",
)
DEMO = "configs/shapes_demo.py"
# Commands of other programs, which are not checked; but commands that they start are.
FOREIGN = ("pip", "python3", ".", "hf", "curl", "vllm", "export", "openssl", "kubectl")
STARTING = ("sbatch", "srun", "mpirun", "gcloud", "ray", "sh", "docker")


class Page(NamedTuple):
    """The parts of a Markdown text: fences by language, code spans of each block, links and headings."""

    fences: list[tuple[str, str]]
    blocks: list[list[str]]
    links: list[str]
    anchors: set[str]

    @property
    def spans(self) -> list[str]:
        """All code spans."""
        return list(itertools.chain(*self.blocks))

    @property
    def commands(self) -> list[list[str]]:
        """Each shell command in words: lines of fences without a language, and code spans that are commands."""
        lines = [text.replace("\\\n", " ") for language, text in self.fences if not language]
        words = [shlex.split(line, comments=True) for text in lines for line in text.splitlines()]
        words += [shlex.split(span) for span in self.spans if _runs(span)]
        return [part for line in words for part in _parts(line)]

    @property
    def overrides(self) -> list[list[str]]:
        """A training command for each block that sets fields in code spans: of the recipe it names, or the demo's."""
        found = []
        for spans in self.blocks:
            given = [
                word for span in spans if span.startswith("--config.") for word in span.split()
            ]
            if given := [word for word in given if "=" in word]:
                recipe = next(
                    (s for s in spans if re.fullmatch(r"configs/\w+\.py(:\S+)?", s)), DEMO
                )
                script = ["python", "launch/train.py", f"--config={recipe}", "--workdir=x"]
                found.append([*script, *given])
        return found


def page(text: str) -> Page:
    """A Markdown text in its parts."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    blocks = [token for token in tokens if token.type == "inline"]
    within = [child for block in blocks for child in block.children]
    links = [child.attrs.get("href") or child.attrs.get("src") for child in within]
    headings = [
        after.content
        for before, after in itertools.pairwise(tokens)
        if before.type == "heading_open"
    ]
    return Page(
        [(token.info, token.content) for token in tokens if token.type == "fence"],
        [[child.content for child in b.children if child.type == "code_inline"] for b in blocks],
        [link for link in links if link],
        {_anchor(heading) for heading in headings},
    )


# ------------------------------------------------------------------------------------ commands


def check_command(words: Sequence[str], stand_ins: Mapping[str, str]) -> None:
    """Parses a command's flags, loads its config with the overrides and opens it at the door; its files must exist.

    Args:
      words: of the command.
      stand_ins: replacements for values that only a user has.
    """
    for word in words:
        _check_path(word.rpartition("=")[2])
    match words:
        case ["python", script, *arguments] if script.startswith("launch/"):
            stand_in = [_replaced(argument, stand_ins) for argument in arguments]
            _check_script(script.removeprefix("launch/"), stand_in)
        case ["python", "-m", module, *_]:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"there is no module {module}")
        case ["python", script, *arguments] if script.startswith(("tests/", "tools/")):
            command_line.check_overrides([script, *arguments])
        case ["make", *arguments]:
            targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
            known = {target for line in targets for target in line.split()}
            if wrong := [word for word in arguments if "=" not in word and word not in known]:
                raise ValueError(f"the Makefile has no target {wrong[0]}")
        case ["pytest", *_]:
            pass
        case [first, *_] if first in FOREIGN:
            pass
        case [first, *rest] if first in STARTING:
            for inner in _started(rest):
                check_command(inner, stand_ins)
        case _:
            raise ValueError(f"what {' '.join(words)!r} runs is not known")


def check_fields(spans: Sequence[str]) -> None:
    """Looks up the fields of a config that a text names: `config.x.y`, `--config.x.y`, or `x.y=...` of a section x."""
    known = flat(default_config())
    for name in ALGORITHMS:
        known |= flat(default_config(name))
    sections = [
        name.split(".")[1] for name, value in known.items() if isinstance(value, ConfigDict)
    ]
    pattern = rf"(?:--)?(?:config\.)?((?:{'|'.join(sections)})(?:\.\w+)+)(?:=.*)?"
    for span in spans:
        for word in re.findall(r"\S+", span) if span.startswith("--") else [span]:
            if re.search(r"\.(py|json)$", word):
                continue
            if match := re.fullmatch(r"(?:--)?(config(?:\.\w+)+)(?:=.*)?", word):
                check_known(match[1], known)
            elif match := re.fullmatch(pattern, word):
                check_known(f"config.{match[1]}", known)


def check_flags(spans: Sequence[str]) -> None:
    """Looks up the options that a text names in all scripts."""
    for span in spans:
        match = re.fullmatch(r"--(\w+)(?:=\S*)?(?: --.*)?", span)
        if match and match[1] not in {name for script in SCRIPTS for name in _flags(script)}:
            raise ValueError(f"no script has an option --{match[1]}")


def _check_script(script: str, arguments: Sequence[str]) -> None:
    command = [f"launch/{script}", *arguments]
    with _loaded(command) as main:
        words = command_line.parse_flags(sys.argv, isinstance(main, Mapping))
        command_line.chosen(main, words[1:])
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        if script == "pretrain.py":
            check_config(config)
        elif config is not None:
            train_config = load_config(config)
            # A slice is planned without prompts and rewards.
            if "topology" not in flags.FLAGS or flags.FLAGS["topology"].value is None:
                fit_config(train_config, _devices(train_config))


@contextlib.contextmanager
def _loaded(command: Sequence[str]) -> Iterator[command_line.Main]:
    """A script's main function, which is not run; absl knows the script's flags within the block."""
    mains: list[Any] = []
    argv = command_line.expand_args(command)
    with flagsaver.flagsaver(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", argv)
        patch.setattr(command_line, "run_main", mains.append)
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        try:
            yield mains[0]
        finally:
            flags.FLAGS.unparse_flags()


@functools.cache
def _flags(script: str) -> frozenset[str]:
    before = set(flags.FLAGS)
    with _loaded([f"launch/{script}"]):
        return frozenset(set(flags.FLAGS) - before | {"help"})


def _devices(config: TrainConfig) -> int:
    """The number of devices of a given placement; 8 where the placement is fitted or planned."""
    placement = config.placement
    if placement.mode != GIVEN:
        return 8
    return placement.rollout.devices * placement.rollout.workers + placement.trainer.devices


def _replaced(argument: str, stand_ins: Mapping[str, str]) -> str:
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{stand_ins.get(value, value)}"


def _runs(span: str) -> bool:
    return span.split()[0] in ("python", "make", "pytest") and len(span.split()) > 1


def _started(words: Sequence[str]) -> Iterator[list[str]]:
    """The commands of this project that another program's words start: its last words, or a word that is a line."""
    python = [place for place, word in enumerate(words) if word == "python"]
    batch = [place for place, word in enumerate(words) if word == "docs/launching/slurm.sh"]
    if python:
        yield list(words[python[-1] :])
    elif batch:
        yield ["python", "launch/train.py", *words[batch[0] + 1 :]]
    for word in words:
        if (begin := word.find("python launch/")) >= 0:
            yield shlex.split(word[begin:])


def _parts(words: list[str]) -> Iterator[list[str]]:
    """The commands that && joins in a line."""
    part: list[str] = []
    for word in [*words, "&&"]:
        if word != "&&":
            part.append(word)
        elif part:
            yield part
            part = []


# ------------------------------------------------------------------------------- names and links


def check_names(spans: Sequence[str]) -> None:
    """Looks up the files, folders, modules and functions of the repository that a text names."""
    for span in spans:
        _check_path(span)
        if re.fullmatch(r"digen_jax(\.\w+)+", span):
            try:
                pkgutil.resolve_name(span)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"there is no {span}: {error}") from error


def check_links(found: Page, place: pathlib.Path) -> None:
    """Follows relative links and images to files, and anchors to headings; `place` is the text's own file."""
    for link in found.links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = place.parent / path if path else place
        if not file.exists():
            raise ValueError(f"there is no file {link}")
        if anchor and anchor not in (page(file.read_text()).anchors if path else found.anchors):
            raise ValueError(f"there is no heading {link}")


def _check_path(text: str) -> None:
    """Refuses a path into a folder of the repository that does not exist."""
    path = re.split(r"[:\s]", text)[0]
    if path.partition("/")[0] in FOLDERS and "/" in path and not (ROOT / path).exists():
        raise ValueError(f"there is no {path}")


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
