"""What is refused before a run on a cluster begins: other files on other nodes, and configs and clusters."""

import sys
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from digen_jax.config.load import read_config
from digen_jax.distributed.engine import RayEngine
from digen_jax.distributed.launch import TrainerPart, check, check_part
from digen_jax.distributed.worker_process import PACKAGE, check_same, fingerprints
from digen_jax.errors import ConfigError
from digen_jax.policies import check_without_ray
from tests.tiny_runs import tiny_config


def test_a_prompt_file_or_code_that_differs_is_named(base, tmp_path):
    config = tiny_config(base, "lora")
    prompts = tmp_path / "prompts.txt"
    config.prompts.file = str(prompts)
    prompts.write_text("a red square\n")
    train_config = read_config(config)
    expected = fingerprints(train_config)
    check_same(expected, train_config)
    with pytest.raises(ConfigError, match=PACKAGE):
        check_same(expected | {PACKAGE: "other"}, train_config)
    prompts.write_text("a blue square\n")
    with pytest.raises(ConfigError, match=prompts.name):
        check_same(expected, train_config)
    prompts.unlink()
    with pytest.raises(ConfigError, match=prompts.name):
        check_same(expected, train_config)


def test_a_workdir_that_the_trainers_node_does_not_see_is_named(base, tmp_path):
    config = read_config(tiny_config(base, "lora"))
    part = TrainerPart("", "", fingerprints(config), "")
    check_part(part, config, str(tmp_path))
    with pytest.raises(ConfigError, match="--workdir"):
        check_part(part, config, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("rollout", "trainer", "one_job", "named"),
    [
        (dict(data=0), {}, False, "rollout.data"),
        ({}, dict(hosts=2), False, "trainer.hosts"),
        (dict(data=1), dict(workers=2, hosts=2), False, r"trainer\.workers.*trainer\.hosts"),
        (dict(data=1), dict(workers=2), True, r"trainer\.workers.*--one_job"),
        (dict(data=1, max_workers=3), {}, True, "max_workers"),
    ],
)
def test_what_ray_cannot_run_is_refused_by_its_field(base, rollout, trainer, one_job, named):
    one = dict(data=1, fsdp=1)
    config = tiny_config(base, "lora")
    config.placement = ConfigDict(dict(rollout=one | rollout, trainer=one | trainer))
    with pytest.raises(ConfigError, match=named):
        check(read_config(config), (None, None, None), one_job)


def test_what_only_ray_runs_is_refused_without_it(base):
    config = tiny_config(base, "lora")
    check_without_ray(read_config(config), {"one_job": False})
    with pytest.raises(ConfigError, match="--one_job"):
        check_without_ray(read_config(config), {"one_job": True})
    config.placement = ConfigDict(dict(rollout=dict(data=2, fsdp=1, hosts=2)))
    with pytest.raises(ConfigError, match=r"rollout\.hosts"):
        check_without_ray(read_config(config), {})
    config.placement = ConfigDict(dict(rollout=dict(data=0), trainer=dict(data=1, workers=2)))
    check(read_config(config), (None, None, None), False)  # a pool of training workers


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--ray=local .*requirements-ray\.txt"):
        RayEngine("local")


def test_a_cluster_of_several_hosts_needs_a_token(monkeypatch):
    util = SimpleNamespace(get_node_ip_address=lambda: "here")
    engine = SimpleNamespace(nodes=[("here", {}), ("there", {})], _ray=SimpleNamespace(util=util))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="--ray_open"):
        RayEngine.check_secure(engine, "here:1", False)
    RayEngine.check_secure(engine, "here:1", True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    RayEngine.check_secure(engine, "here:1", False)
