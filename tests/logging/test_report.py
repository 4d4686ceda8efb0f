"""The HTML of a report, read by a parser; test_browser.py opens it in a browser."""

import base64
import dataclasses
import html.parser
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from digen_jax.errors import ConfigError
from digen_jax.logging import report
from digen_jax.logging.report import line_of, task_table, thinned, time_table, write_report
from digen_jax.logging.report_run import differing, image_pairs, read_run, timeline
from digen_jax.logging.timeline import TraceFile
from tests.logging.workdirs import HOSTILE, intervals, level, write_workdir
from tests.pipelines import ROOT

TRAINED_ON = {"prompts": {"files": [], "file": "a.txt"}, "evaluation": {"prompts": "a.txt"}}


class Parsed(html.parser.HTMLParser):
    """Tags, attributes, scripts by their types, and the text outside of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.attributes, self.scripts, self.text, self.tags = [], [], "", []
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("type", tag)
            self.scripts.append([self._inside, ""])

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data):
        if self._inside is not None:
            self.scripts[-1][1] += data
        else:
            self.text += f"{data} "


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory) -> list[pathlib.Path]:
    base = tmp_path_factory.mktemp("runs")
    return [write_workdir(base / f"seed{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def written(workdirs) -> tuple[str, int, int]:
    sizes = write_report(workdirs[:1], workdirs[0] / "report.html")
    return (workdirs[0] / "report.html").read_text(), *sizes


@pytest.fixture(scope="module")
def parsed(written) -> Parsed:
    return Parsed(written[0])


def words(parsed: Parsed) -> str:
    return " ".join(parsed.text.split())


def test_the_page_is_small_and_requests_nothing(written, parsed):
    text, images, rest = written
    urls = [
        value
        for tag, name, value in parsed.attributes
        if name in ("src", "href", "srcset", "action", "data", "poster", "background")
    ]
    # Two pairs, three steps' grids and the best images of the last; the worst are incomplete.
    assert len(urls) == 2 * 2 + 3 + 1
    assert all(url.startswith("data:image/webp;base64,") for url in urls)
    assert not {"link", "iframe", "object", "embed", "form", "base"} & set(parsed.tags)
    (style,) = (text for kind, text in parsed.scripts if kind == "style")
    assert not re.search(r"url\(|@import", style)
    (policy,) = (value for _, name, value in parsed.attributes if value.startswith("default-src"))
    assert "default-src 'none'" in policy and "http" not in policy
    shown = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert {image.format for image in shown} == {"WEBP"}
    before, after = (np.asarray(image.convert("RGB")) for image in shown[:2])
    assert (before == 0).all() and (after == 200).all() and after.shape == (16, 16, 3)
    assert 1_000_000 < rest <= 2_000_000
    assert images == sum(map(len, urls)) and images + rest == len(text.encode())


def test_texts_of_a_user_stay_texts(parsed):
    assert parsed.text.count(HOSTILE) == 2  # a prompt and a task
    kinds = [kind for kind, _ in parsed.scripts]
    assert sorted(kinds) == ["application/json", "script", "script", "script", "style"]
    json.loads(next(text for kind, text in parsed.scripts if kind == "application/json"))


def test_curves_of_each_reward_are_named_trained_or_not(workdirs):
    found = report.charts([run := read_run(workdirs[0])])
    titles = [chart.title for chart in found["rewards"]]
    assert titles == ["reward (weighted sum)", "shapes_geneval (trained)", "watched (not trained)"]
    assert found["rewards"][2].curves == {
        "training": "reward_of/watched",
        "held-out prompts": "evaluation/reward_of/watched",
    }
    assert list(found["tasks"][0].curves) == ["colors", HOSTILE]
    assert [chart.title for chart in found["images"]] == ["sharpness", "diversity"]
    for kl in (0.0, 1e-6):  # one that is always 0 has no chart
        lines = [{"step": i, "approx_kl": value} for i, value in enumerate((0.0, kl))]
        found = report.charts([dataclasses.replace(run, metrics=lines)])
        assert any("approx_kl" in c.curves.values() for c in found["training"]) == (kl > 0)


def test_prompts_that_are_trained_on_are_not_labelled_as_held_out(workdirs):
    run = read_run(workdirs[0])
    other = dataclasses.replace(run, config=run.config | TRAINED_ON)
    for runs, label in (
        ([run], "held-out prompts"),
        ([other], "training prompts"),
        ([run, other], "evaluation prompts"),
    ):
        found = report.charts(runs)
        assert label in found["rewards"][0].curves and found["tasks"][0].title.startswith(label)


def test_bands_span_the_runs_at_the_steps_that_all_have(workdirs, tmp_path):
    runs = [read_run(workdir) for workdir in workdirs]
    short = read_run(write_workdir(tmp_path / "going on", seed=2, done=7))
    line = line_of([*runs, short], "evaluation/reward")
    assert line.steps.tolist() == [0, 5] and line.raw is None
    np.testing.assert_allclose(line.mean, [level(0, 1), level(5, 1)])
    np.testing.assert_allclose(line.low, [level(0, 0), level(5, 0)])
    np.testing.assert_allclose(line.high, [level(0, 2), level(5, 2)])
    assert line_of(runs, "no such metric") is None
    dense = line_of(runs[:1], "reward")
    np.testing.assert_allclose(dense.raw, [level(step, 0) for step in range(1, 11)])
    assert dense.mean[0] == pytest.approx(level(1, 0) + 0.05 * 1.5)  # of steps 1 to 4
    assert differing(runs) == {"config.seed": ["0", "1"]}
    _, before, _, gain, _ = task_table(runs)[0]
    assert before == "0.250 (0.200 to 0.300)" and gain == "+0.500 (+0.500 to +0.500)"
    thin = thinned(dense, 4)
    assert thin.steps.tolist() == [1, 4, 7, 10] and thin.raw[-1] == dense.raw[-1]


@pytest.mark.slow
def test_a_long_run_with_many_rewards_and_tasks_keeps_to_the_limit(tmp_path):
    run = write_workdir(tmp_path / "run", steps=3000)
    rng = np.random.default_rng(0)
    named = {"reward_of/r": 20, "evaluation/reward_of/r": 20, "evaluation/t": 30}
    names = [f"{name}{number}" for name, count in named.items() for number in range(count)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(3001):
            own = [n for n in names if step % 20 == 0 or not n.startswith("evaluation/")]
            line = {"step": step, "seconds/clock": 1e9 + step, "reward": 0.5, "utilisation": 0.5}
            values = dict(zip(own, rng.random(len(own)).tolist(), strict=True))
            file.write(json.dumps(line | values | {"evaluation/reward": 0.5}) + "\n")
    trace = TraceFile(run / "timeline.json")
    trace.write([one for step in range(2500) for one in intervals(step)], clock=1e9)
    _, rest = write_report([run], tmp_path / "report.html")
    assert 1_500_000 < rest <= 2_000_000


def test_the_timeline_of_a_step_is_the_time_of_its_work(workdirs):
    found = timeline(run := read_run(workdirs[0]))
    assert found["rows"] == ["rollout 0", "trainer", "reward"]
    assert found["steps"][:2] == [[1, 0.0, 11000.0], [2, 10000.0, 21000.0]]
    assert len(found["steps"]) == 10 and len(found["spans"]) == 40
    kinds = dict(found["kinds"])
    assert kinds["train"] == "#54a24b" and kinds["wait for reward"] == "#dddddd"
    train = [name for name, _ in found["kinds"]].index("train")
    assert [1, train, 5000.0, 6000.0, 0] in found["spans"]
    newest = timeline(run, 6)
    assert [step for step, *_ in newest["steps"]] == [10] and len(newest["spans"]) == 5
    assert time_table([run]) == [  # means over the later half
        ("train", 2.0 * np.mean([6, 7, 8, 9, 10]), "seconds"),
        ("wait for faster worker", 1.0, "device-seconds"),
    ]


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    run = write_workdir(tmp_path / "begun", done=3)
    for left in ("timeline.json", "starts.jsonl"):
        (run / left).unlink()
    shutil.rmtree(run / "images")
    found = read_run(run)
    assert timeline(found) is None
    trained_on = dataclasses.replace(found, config=found.config | TRAINED_ON)
    shown = words(Parsed(report.render([trained_on])))
    assert "3 of 10 steps done, not finished" in shown and "Training prompts: sampled" in shown


def test_prompts_of_an_older_runs_images_are_numbers(tmp_path):
    run = write_workdir(tmp_path / "old")
    (run / "images").rename(run / "pictures")
    for name in ("before", "after"):
        path = run / "pictures" / f"{name}.npz"
        with np.load(path) as found:
            kept = {key: found[key] for key in found.files if key != "prompts"}
        np.savez(path, **kept)
    step, found = image_pairs(read_run(run))
    assert step == 10 and [one.prompt for one in found] == ["prompt 1", "prompt 2"]
    assert found[1].scores == (0.5, 1.0)


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("config.json", None, ""),
        ("config.json", "{", ""),
        ("metrics.jsonl", "x\n", ", line 1"),
        ("config.json", "[" * 10**5, ""),
        ("config.json", f'{{"steps": {"1" * 5000}}}', ""),
        ("config.json", "[]", ""),
        ("config.json", '{"model": {"folder": "x"}, "steps": 3}', ""),
        ("starts.jsonl", "x\n", ", line 1"),
        ("starts.jsonl", "3\n", ", line 1"),
        ("starts.jsonl", '{"command": []}\n', ", line 1"),
    ],
)
def test_an_invalid_file_is_named(tmp_path, file, content, line):
    run = write_workdir(tmp_path / "run", done=1)
    (run / file).unlink() if content is None else (run / file).write_text(content)
    with pytest.raises(ConfigError) as found:
        read_run(run)
    assert str(found.value).startswith(f"{run / file}{line}")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError):
        read_run(run)


def test_the_script_writes_the_page_without_jax(workdirs, tmp_path):
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import runpy, sys; sys.modules['jax'] = None; sys.argv = sys.argv[1:]; "
        code += "sys.path[0] = 'launch'; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code, "launch/report.py", *map(str, arguments)]
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)

    output = tmp_path / "deep" / "two.html"
    done = script(*(f"--workdir={one}" for one in workdirs), f"--output={output}")
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(rf"{output}: 1\.\d\d MB and 0\.\d\d MB of images\n", done.stdout)
    both = Parsed(output.read_text())
    assert both.tags.count("figure") == 4
    assert "bands span them" in words(both) and "config.seed 0 1" in words(both)
