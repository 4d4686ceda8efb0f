"""Control and link between two processes, as measured."""

import json

import pytest

from tests.scripts import run_script


@pytest.mark.slow
def test_both_transports_are_measured(tmp_path):
    output = tmp_path / "link.json"
    asked = "--rounds=1", "--commands=50", "--meshes=64", "--rate=200"
    done = run_script("benchmark.py", "link", *asked, f"--output={output}")
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["round_trip"] > 0 and found["rate"] > 0
    assert found["mebibytes"] == {"one array": 64.0, "300 arrays of a LoRA": 14.0625}
    for transport in ("bytes", "transfer"):
        for tree, seconds in found["seconds"][transport].items():
            assert seconds > 0 and f"{transport}: {tree}, " in done.stdout
    load = found["load"]
    assert load["meshes"] == 64 and load["threads"] < 64
    assert all(load[kind]["rate"] > 0 for kind in ("paced", "full")), load
