"""The files of docs/launching: the JobSet matches its schema, and all commands parse."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml

from tests import documents
from tests.pipelines import ROOT

FOLDER = ROOT / "docs" / "launching"
SCHEMA = json.loads((ROOT / "tests" / "data" / "jobset_crd.json").read_text())["schema"]
RBAC = "rbac.authorization.k8s.io"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobset() -> dict[str, Any]:
    (found,) = [one for one in objects("jobset.yaml") if one["kind"] == "JobSet"]
    return found


def strict(schema: Any) -> Any:
    """A schema that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    return found


def check(found: Mapping[str, Any]) -> None:
    """Raises jsonschema.ValidationError; rules in CEL are not checked."""
    jsonschema.Draft202012Validator(strict(SCHEMA)).validate(found)


def rayjob() -> dict[str, Any]:
    (found,) = objects("rayjob.yaml")
    return found


def test_a_jobset_is_one_by_its_schema():
    found = jobset()
    assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and found["metadata"] == {
        "name": "tune"
    }
    check(found)


def test_an_unknown_field_of_a_jobset_is_found():
    found = jobset()
    found["spec"]["failurepolicy"] = {}
    with pytest.raises(jsonschema.ValidationError, match="failurepolicy"):
        check(found)


def test_pods_of_a_jobset_fit_together():
    """Indexed jobs, names of containers and volumes, and the policy's preconditions, which are in no schema."""
    for job in jobset()["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["parallelism"] == spec["completions"] and job.get("replicas", 1) == 1
        assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy requires
        (container,) = pod["containers"]
        (rule,) = spec["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"]["containerName"] == container["name"]
        volumes = [volume["name"] for volume in pod.get("volumes", [])]
        assert [mount["name"] for mount in container.get("volumeMounts", [])] == volumes


def test_the_account_of_the_pods_may_ask_what_jax_asks():
    account, role, binding, workload = objects("jobset.yaml")
    assert (account["apiVersion"], account["kind"]) == ("v1", "ServiceAccount")
    for one, kind in ((role, "Role"), (binding, "RoleBinding")):
        assert (one["apiVersion"], one["kind"]) == (f"{RBAC}/v1", kind)
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    # list_namespaced_pod and read_namespaced_job of jax._src.clusters.k8s_cluster.
    assert allowed == {("", "pods", "list"), ("batch", "jobs", "get")}
    name = account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
    assert binding["roleRef"] == dict(apiGroup=RBAC, kind="Role", name=role["metadata"]["name"])
    (job,) = workload["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["serviceAccountName"] == name


def test_a_rayjob_has_the_gpus_that_its_command_places():
    spec = rayjob()["spec"]["rayClusterSpec"]
    groups = [(1, spec["headGroupSpec"])] + [
        (one["replicas"], one) for one in spec["workerGroupSpecs"]
    ]
    gpus = []
    for count, group in groups:
        (container,) = group["template"]["spec"]["containers"]
        gpus += [container["resources"]["limits"]["nvidia.com/gpu"]] * count
    config = dict(
        re.findall(r"--config\.placement\.rollout\.(\w+)=(\d+)", rayjob()["spec"]["entrypoint"])
    )
    trainer = int(re.findall(r"geneval,(\d+)", rayjob()["spec"]["entrypoint"])[0])
    assert sorted(gpus) == sorted([trainer] + [int(config["data"])] * int(config["workers"]))


# ------------------------------------------------------------------------------- commands


def commands() -> list[list[str]]:
    (job,) = jobset()["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    submitted = shlex.split(rayjob()["spec"]["entrypoint"])
    found = [[*container["command"], *container["args"]], submitted[submitted.index("python") :]]
    (line,) = re.findall(r"^exec srun .*$", (FOLDER / "slurm.sh").read_text(), re.M)
    demo = ["--config=configs/shapes_demo.py", "--workdir=x"]
    words = [*shlex.split(line)]
    at = words.index("$@")
    found.append([*words[words.index("python") : at], *demo, *words[at + 1 :]])
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_of_a_file_is_accepted(command, tmp_path, monkeypatch):
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("a photo of a red star\n")
    (tmp_path / "my_rewards.py").write_text("def redness(images, prompts, metadata): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = {name: str(tmp_path / name) for name in ("train.txt", "test.txt")}
    documents.check_command(command, files)


def test_the_batch_script_is_one():
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
