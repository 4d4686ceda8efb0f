"""docs/launching.md and its files: Kubernetes accepts the objects, all commands parse, the certificates work."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

import grpc
import jsonschema
import pytest
import yaml

from digen_jax.remote.identity import Identity
from digen_jax.remote.wire import Tls, Wire
from tests import documents
from tests.documents import page
from tests.pipelines import ROOT

FOLDER = ROOT / "docs" / "launching"
SCHEMA = json.loads((ROOT / "tests" / "data" / "jobset_crd.json").read_text())["schema"]
RBAC = "rbac.authorization.k8s.io"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobset(name: str) -> dict[str, Any]:
    (found,) = [one for one in objects(name) if one["kind"] == "JobSet"]
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


JOBSETS = ["jobset.yaml", "jobset_apart.yaml"]


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_is_one_by_its_schema(name):
    found = jobset(name)
    assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and found["metadata"] == {
        "name": "tune"
    }
    check(found)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("spec/failurepolicy", {}, "failurepolicy"),
        ("spec/replicatedJobs/0/template/spec/parallelism", "2", "is not of type 'integer'"),
        ("spec/replicatedJobs/0/template/spec/template/spec/container", [], "container"),
        ("spec/failurePolicy/rules/0/action", "FailJobset", "is not one of"),
        ("spec/replicatedJobs/0/template/spec/template/spec/containers/0/args/0", 16, "is not of"),
    ],
)
def test_a_mistake_in_a_jobset_is_found(path, value, sentence):
    found = jobset("jobset.yaml")
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    inner = found
    for part in parents:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(jsonschema.ValidationError, match=sentence):
        check(found)


@pytest.mark.parametrize("name", JOBSETS)
def test_pods_of_a_jobset_fit_together(name):
    """What no schema says: indexed jobs, names of containers, volumes and secrets, the policy's preconditions."""
    for job in jobset(name)["spec"]["replicatedJobs"]:
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
        (token,) = [one for one in container["env"] if one["name"] == "DIGEN_JAX_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "digen-jax", "key": "token"}}


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


def test_the_processes_of_a_jobset_apart_are_counted_through():
    """As a shell in each pod counts them; the first is where the others look for it."""
    found = jobset("jobset_apart.yaml")
    numbers, count = [], set()
    for job in found["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        *shell, line = container["command"]
        assert shell == ["sh", "-c"]
        (first,) = [one["value"] for one in container["env"] if one["name"] == "FIRST"]
        count |= set(re.findall(r"--processes=(\d+)", line))
        for index in range(job["template"]["spec"]["parallelism"]):
            given = {"FIRST": first, "JOB_COMPLETION_INDEX": str(index), "PATH": "/usr/bin:/bin"}
            said = subprocess.run(
                ["sh", "-c", line.replace("exec python", "echo")],
                env=given,
                capture_output=True,
                text=True,
            )
            assert f"--coordinator={found['metadata']['name']}-trainer-0-0." in said.stdout
            numbers += map(int, re.findall(r"--process=(\d+)", said.stdout))
    assert numbers == list(range(4)) and count == {"4"}


# ------------------------------------------------------------------------------- commands


def commands() -> list[list[str]]:
    found = []
    for name in JOBSETS:
        for job in jobset(name)["spec"]["replicatedJobs"]:
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            words = [*container["command"], *container.get("args", [])]
            if words[0] == "sh":
                line = words[2].replace("$((FIRST + JOB_COMPLETION_INDEX))", "0")
                words = shlex.split(line.removeprefix("exec "))
            if words not in found:
                found.append(words)
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


# ------------------------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Tls:
    """Made by the page's commands, for this host."""
    folder = tmp_path_factory.mktemp("certificates")
    found = page((ROOT / "docs" / "launching.md").read_text()).commands
    lines = [words for words in found if words[0] == "openssl"]
    assert [words[1] for words in lines] == ["req", "req", "x509"]
    for words in lines:
        here = [
            word.replace("node1", "localhost").replace("10.0.0.1", "127.0.0.1") for word in words
        ]
        subprocess.run(here, cwd=folder, check=True, capture_output=True)
    return Tls(folder / "job.pem", folder / "job.key", folder / "authority.pem")


def test_processes_with_the_pages_certificates_reach_one_another(certificates):
    wire = Wire(Identity("t" * 16, "config", "code"), certificates)
    server, port = wire.server("localhost:0", [])
    try:
        for host in ("localhost", "127.0.0.1"):
            channel = wire.channel(f"{host}:{port}")
            grpc.channel_ready_future(channel).result(20)
            channel.close()
        plain = Wire(wire.identity).channel(f"localhost:{port}")
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(plain).result(0.5)
        plain.close()
    finally:
        server.stop(0).wait()
