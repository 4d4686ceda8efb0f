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
    ("command", "sentence"),
    [
        (
            (*SAMPLE, "--output=FILE"),
            "--output = 'FILE' is a file already: give the name of a folder",
        ),
        (
            (*SAMPLE, "--output=FILE/x"),
            "--output = 'FILE/x' is inside FILE, which is a file: choose",
        ),
        ((*SAMPLE, "--output=IMAGES"), "--output = 'IMAGES' has images already, such as 0.png"),
        ((*EVALUATE, "--pictures=IMAGES"), "--pictures = 'IMAGES' has images already"),
        ((*EVALUATE, "--pictures=ABOVE"), "--pictures = 'ABOVE' has images already"),
        ((*SAMPLE, "--output="), "--output is empty: give the name of a folder"),
        ((*SAMPLE, "--output=x", "--guidance=nan"), "--guidance must be 0 or more, not nan"),
        ((*SAMPLE, "--output=x", "--batch=0"), "--batch must be above 0, not 0"),
        (
            (*SAMPLE, "--output=x", "--prompt=gr\udcfcn"),
            "--prompt='gr\\udcfcn' is not UTF-8 at character 3: write the prompt in that",
        ),
        (
            (*SAMPLE, "--output=x", "--negative_prompt=gr\udcfcn"),
            "--negative_prompt='gr\\udcfcn' is not UTF-8 at character 3: write the prompt in that",
        ),
        (
            (*SAMPLE, "--output=x", "--true_cfg_scale=-2"),
            "--true_cfg_scale must be 0 or more, not -2.0",
        ),
        ((*EVALUATE, "--true_cfg_scale=nan"), "--true_cfg_scale must be 0 or more, not nan"),
        ((*EVALUATE, "--batch=-1"), "--batch must be above 0, not -1"),
        ((*SAMPLE, "--output=x", "--guidance=-2"), "--guidance must be 0 or more, not -2.0"),
        (
            (*EVALUATE, "--output=FOLDER"),
            "--output = 'FOLDER' is a folder already: give the name of a",
        ),
        (
            (*EVALUATE, "--output=FILE/x.json"),
            "--output = 'FILE/x.json' is inside FILE, which is a file",
        ),
        ((*EVALUATE, "--guidance=1,inf"), "--guidance must be at most 1000, not inf"),
        (
            (*SERVER, "--memory=5"),
            "--memory=5 must hold one request: 134217728 bytes by --body and",
        ),
        (
            ("reward_server.py", "--reward=shapes_genevil"),
            "unknown reward 'shapes_genevil': use one",
        ),
        ((*SERVER, "--port=70000"), "--port=70000 must be 0 to 65535"),
        ((*PLAN, "--output=FOLDER"), "--output = 'FOLDER' is a folder already: give the name of a"),
        ((*PLAN, "--memory=nan"), "--memory must be above 0, not nan"),
        ((*PLAN, "--trainer_serial=5"), "--trainer_serial must be at most 1, not 5.0"),
        ((*PRETRAIN, "--workdir=x", "--output=FILE"), "--output = 'FILE' is a file already: give"),
        (
            (*PRETRAIN, "--workdir=x", "--output=y", "--config.transformer.fit.learning_rate=nan"),
            "config.transformer.fit.learning_rate must be a finite number, not nan",
        ),
        (
            ("train.py", SHAPES, "--workdir=x", "--config.placement.cpu_devices=100000"),
            "config.placement.cpu_devices must be at most 256, not 100000",
        ),
        (
            ("export.py", "--workdir=x", "--output=FILE"),
            "FILE exists already: choose another folder",
        ),
        (
            ("export.py", "--workdir=x", "--output=FILE/x"),
            "--output = 'FILE/x' is inside FILE, which",
        ),
        (
            ("status.py", "--workdir=FOLDER"),
            "--workdir = 'FOLDER' has no status.json: use the workdir",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, command, sentence):
    (tmp_path / "file").write_text("")
    names = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    names |= {"IMAGES": str(tmp_path / "guidance_2"), "ABOVE": str(tmp_path)}
    (tmp_path / "guidance_2").mkdir()
    (tmp_path / "guidance_2" / "0.png").touch()

    def named(text):
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    script, *arguments = map(named, command)
    done = run_forked(script, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{script}: {named(sentence)}")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("command", "range_"),
    [
        ((*SAMPLE, "--output=x", "--seed=-1"), "[0, 4294967295]"),
        ((*SAMPLE, "--output=x", "--seed=99999999999999999999"), "[0, 4294967295]"),
        ((*SAMPLE, "--output=x", "--steps=1000000000"), "[1, 1000]"),
        ((*SAMPLE, "--output=x", "--height=100000"), "[1, 16384]"),
        ((*EVALUATE, "--width=0"), "[1, 16384]"),
        ((*EVALUATE, "--seed=4294967296"), "[0, 4294967295]"),
        ((*EVALUATE, "--steps=0"), "[1, 1000]"),
        ((*PLAN, "--devices=100000"), "[1, 1024]"),
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
