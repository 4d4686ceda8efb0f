"""Wrong flags of the scripts: one line each, before a model is read."""

import pytest

from tests.scripts import run_forked, run_script

SHAPES = "--config=configs/shapes_flow_grpo.py"
SAMPLE = ("sample.py", "--model=assets/shapes-sd3", "--prompt=a red star")
EVALUATE = (
    "evaluate.py",
    "--model=assets/shapes-sd3",
    "--prompts=assets/prompts/shapes_heldout.jsonl",
    "--reward=shapes_geneval",
)
PLAN = ("plan.py", SHAPES, "--costs=none.json")
SERVER = ("reward_server.py", "--reward=shapes_geneval")
PRETRAIN = ("pretrain.py", "--config=configs/shapes_pretrain.py")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ((*SAMPLE, "--output=FILE"), "--output = 'FILE' is a file already"),
        ((*SAMPLE, "--output=FILE/x"), "--output = 'FILE/x' is inside FILE"),
        ((*SAMPLE, "--output=IMAGES"), "--output = 'IMAGES' has images already, such as 0.png"),
        ((*SAMPLE, "--output="), "--output is empty"),
        ((*SAMPLE, "--output=x", "--guidance=nan"), "--guidance must be"),
        ((*SAMPLE, "--output=x", "--batch=0"), "--batch must be"),
        ((*SAMPLE, "--output=x", "--format=mp4", "--height=33"), "--format: H.264 needs"),
        ((*SAMPLE, "--output=x", "--prompt=gr\udcfcn"), "--prompt='gr\\udcfcn' is not UTF-8"),
        ((*SAMPLE, "--output=x", "--true_cfg_scale=-2"), "--true_cfg_scale must be"),
        ((*SAMPLE, "--output=x", "--prompts=b.txt"), "there must be either --prompt "),
        ((*EVALUATE, "--image_folder=ABOVE"), "--image_folder = 'ABOVE' has images already"),
        ((*EVALUATE, "--pictures=IMAGES"), "--pictures is not an option; it is --image_folder now"),
        ((*EVALUATE, "--output=FOLDER"), "--output = 'FOLDER' is a folder already"),
        ((*EVALUATE, "--guidance=1,inf"), "--guidance must be"),
        ((*EVALUATE, "--format=mp4", "--width=33"), "--format: H.264 needs"),
        (EVALUATE[:2], "a pipeline has no prompts and rewards: set --prompts and --reward"),
        ((*EVALUATE, "--reward_weights=1,2"), "--reward_weights=1,2 must be 1 numbers"),
        (("train.py", SHAPES, "--workdir=x", "--profile=5-3"), "--profile=5-3 must be a step or a"),
        ((*SERVER, "--memory=5"), "--memory=5 must"),
        (("reward_server.py", "--reward=shapes_genevil"), "unknown reward 'shapes_genevil'"),
        ((*PLAN, "--output=FOLDER"), "--output = 'FOLDER' is a folder already"),
        (PLAN, "--costs=none.json cannot be read as JSON"),
        (PLAN[:2], "give the costs of commands: by --costs="),
        ((*PLAN, "--trainer_serial=5"), "--trainer_serial must be"),
        ((*PRETRAIN, "--workdir=x", "--output=FILE"), "--output = 'FILE' is a file already"),
        (
            (*PRETRAIN, "--workdir=x", "--output=y", "--config.transformer.fit.learning_rate=nan"),
            "config.transformer.fit.learning_rate must be",
        ),
        (("export.py", "--workdir=x", "--output=FILE"), "FILE exists already"),
        (("status.py", "--workdir=FOLDER"), "--workdir = 'FOLDER' has no status.json"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, command, named):
    (tmp_path / "file").write_text("")
    names = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    names |= {"IMAGES": str(tmp_path / "guidance_2"), "ABOVE": str(tmp_path)}
    (tmp_path / "guidance_2").mkdir()
    (tmp_path / "guidance_2" / "0.png").touch()

    def in_folder(text):
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    script, *arguments = map(in_folder, command)
    done = run_forked(script, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{script}: {in_folder(named)}")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("command", "range_"),
    [
        ((*SAMPLE, "--output=x", "--seed=-1"), "[0, 4294967295]"),
        ((*SAMPLE, "--output=x", "--steps=1000000000"), "[1, 1000]"),
        ((*SAMPLE, "--output=x", "--height=100000"), "[1, 16384]"),
        ((*SAMPLE, "--output=x", "--fps=0"), "[1, 120]"),
        ((*SAMPLE, "--output=x", "--frames=0"), "[1, 1024]"),
        ((*EVALUATE, "--fps=0"), "[1, 120]"),
        ((*EVALUATE, "--steps=0"), "[1, 1000]"),
        ((*PLAN, "--devices=0"), "[1, 1024]"),
    ],
)
def test_a_number_outside_of_its_range_is_refused_by_its_flag(command, range_):
    script, *arguments = command
    done = run_forked(script, *arguments)
    flag = arguments[-1].partition("=")[0]
    assert done.returncode == 2
    assert f"flag {flag}=" in done.stderr and range_ in done.stderr


def test_devices_that_there_are_not_are_one_line(tmp_path, monkeypatch):
    platforms, output = "cuda", tmp_path / "output"
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    done = run_script("train.py", SHAPES, f"--workdir={output}")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.py: ")
    assert "JAX_PLATFORMS=" in done.stderr and "Traceback" not in done.stderr
    assert not (output / "config.json").exists()
