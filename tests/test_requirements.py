"""What is installed: bounds and exact versions of packages, and a wheel with commands, configs and the model."""

import importlib.metadata
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.pipelines import ROOT, environment

PYTHONS = sorted(path.stem for path in (ROOT / "constraints").glob("*.txt"))


def requirements(name: str) -> list[Requirement]:
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and line[0] not in "#-"]


USERS = ["requirements.txt", "requirements-reward.txt"]


@pytest.mark.parametrize("name", USERS)
def test_what_a_user_needs_has_a_lower_and_an_upper_bound(name):
    for requirement in requirements(name):
        kinds = {bound.operator for bound in requirement.specifier}
        assert kinds == {">=", "<"}, requirement


@pytest.mark.parametrize("name", ["requirements-tpu.txt", "requirements-gpu-check.txt"])
def test_compilers_have_exact_versions(name):
    for pinned in requirements(name):
        (version,) = pinned.specifier
        assert version.operator == "=="


@pytest.mark.parametrize("python", PYTHONS)
def test_the_cuda_compiler_has_the_version_of_jaxlib_and_no_other_wheel_of_nvidia(python):
    system = dict(python_version=python, python_full_version=f"{python}.0", extra="")

    def exact(name):
        wanted = [
            one for one in requirements(name) if not one.marker or one.marker.evaluate(system)
        ]
        return {one.name: str(one.specifier) for one in wanted}

    jaxlib = exact(f"constraints/{python}.txt")["jaxlib"]
    found = exact("requirements-gpu-check.txt")
    assert found.pop("nvidia-cudnn-cu12")
    assert found == {"jax-cuda12-plugin": jaxlib, "jax-cuda12-pjrt": jaxlib}


def test_make_knows_these_pythons():
    (pythons,) = [
        x for x in (ROOT / "Makefile").read_text().splitlines() if x.startswith("PYTHONS")
    ]
    assert pythons.split()[2:] == PYTHONS


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_version_within_its_bounds(python):
    system = dict(python_version=python, python_full_version=f"{python}.0", extra="")
    exact = {}
    for pinned in requirements(f"constraints/{python}.txt"):
        if pinned.marker is None or pinned.marker.evaluate(system):
            (version,) = pinned.specifier
            assert version.operator == "==" and pinned.name not in exact
            exact[pinned.name] = version.version
    for wanted in itertools.chain(*map(requirements, [*USERS, "requirements-dev.txt"])):
        name = wanted.name.lower().replace("_", "-")
        assert wanted.specifier.contains(exact[name]), wanted


@pytest.mark.parametrize("accelerator", ["cuda12", "cuda13", "tpu"])
def test_make_installs_for_an_accelerator(accelerator):
    """JAX has such an extra, which is installed with the exact versions."""
    assert accelerator in importlib.metadata.metadata("jax").get_all("Provides-Extra")
    command = ["make", "-n", "demo", f"ACCELERATOR={accelerator}", f"PYTHON={sys.executable}"]
    made = subprocess.run([*command, "VENV=none"], cwd=ROOT, capture_output=True, text=True)
    given = shlex.split(next(x for x in made.stdout.splitlines() if " -m pip install " in x))
    assert {f"jax[{accelerator}]", "-r", "requirements.txt"} <= {*given}
    assert given[given.index("-c") + 1].startswith("constraints/")


def test_the_image_installs_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert defaults["PYTHON"] in PYTHONS
    extras = importlib.metadata.metadata("jax").get_all("Provides-Extra")
    assert {*defaults["EXTRAS"].split(",")} <= {*extras}
    lines = text.replace("\\\n", " ").replace("${PYTHON}", defaults["PYTHON"]).splitlines()
    first = lines[: lines.index("COPY . .")]  # what packages are installed from
    copied = {file for line in first if line.startswith("COPY ") for file in line.split()[1:-1]}
    files = {file for pattern in copied for file in ROOT.glob(pattern)}
    (install,) = (shlex.split(line) for line in first if line.startswith("RUN pip install"))
    read = [ROOT / file for option, file in itertools.pairwise(install) if option in ("-r", "-c")]
    assert len(read) == 5
    for file in read:
        assert file.exists() and {file, file.parent} & files


def test_every_launch_script_is_a_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    names = {path.stem.replace("_", "-") for path in (ROOT / "launch").glob("*.py")}
    assert scripts == {f"digen-{name}": "digen_jax.process.ctrl_c:run_installed" for name in names}


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_works_from_any_directory(tmp_path):
    source, venv, here = (tmp_path / name for name in ("source", "venv", "here"))
    source.mkdir(), here.mkdir()
    for path in ROOT.iterdir():  # a build writes into its folder
        if path.name in ("digen_jax", "launch", "configs", "assets", "benchmarks", "examples"):
            shutil.copytree(path, source / path.name)
        elif path.is_file():
            shutil.copy(path, source)
    variables = {name: value for name, value in environment(1).items() if name != "PYTHONPATH"}

    def call(*command, code=0):
        done = subprocess.run(
            list(map(str, command)), cwd=here, env=variables, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip = (sys.executable, "-m", "pip")
    alone = ("-q", "--no-deps", "--no-index")
    call(*pip, "wheel", *alone, "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    call(*pip, "--python", venv / "bin" / "python", "install", *alone, wheel)
    (packages,) = venv.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    said = call(venv / "bin" / "python", "-c", "import digen_jax; print(digen_jax.__file__)")
    assert said.strip() == str(packages / "digen_jax" / "__init__.py")
    sample = ("--model", "assets/shapes-sd3", "--prompt", "a red ring", "--output", here / "a")
    call(venv / "bin" / "digen-sample", *sample, "--steps=1")
    assert (here / "a" / "grid.png").exists()
    # All but one reward is found: the config, the model, both prompt files and the shapes reward.
    run = ("--config", "configs/shapes_demo.py", "--workdir", "run")
    rewards = ("--config.rewards=shapes_geneval", "--config.rewards=none:f")
    said = call(venv / "bin" / "digen-train", *run, *rewards, code=2)
    assert "config.rewards[1]" in said and "config.prompts" not in said, said
    said = call(venv / "bin" / "digen-benchmark", "runtime", "--devices=1", code=2)
    assert "--devices=1" in said, said
    outputs = (
        "--workdir",
        "pretrain",
        "--output",
        wheel / "model",
    )  # in a file instead of a folder
    run = ("--config", "configs/shapes_pretrain.py", *outputs)
    said = call(venv / "bin" / "digen-pretrain", *run, code=2)
    assert "--output" in said, said
