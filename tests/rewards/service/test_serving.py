"""Real servers and sockets: hostile clients, signals, ports, and clients of a killed server."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.service.client import RemoteReward
from digen_jax.rewards.service.server import Service, listen
from digen_jax.rewards.service.server import serve as serve_here
from digen_jax.rewards.service.wire import encode_request
from tests.pipelines import ROOT
from tests.rewards.service.helpers import means, random_images
from tests.scripts import ends

REWARD = """
import os, time
import numpy as np

def mean(images, prompts, metadata):
    for record in metadata:
        if "started" in record:
            open(record["started"], "w").close()
    if "hang" in prompts:
        time.sleep(600)
    if "die" in prompts:
        os._exit(3)
    time.sleep(sum(record.get("seconds", 0) for record in metadata))
    return np.asarray(images, np.float32).reshape(len(images), -1).mean(1) / 255

def never_ready(images, prompts, metadata):
    time.sleep(600)

def needs_tag(images, prompts, metadata):
    return [len(record["tag"]) for record in metadata]
"""
NAME = "served_rewards:mean"


class Server:
    """The process of a server."""

    def __init__(self, folder, *arguments, files=None, **environment):
        limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash"] if files else []
        self.folder = folder
        self.process = subprocess.Popen(
            [*limited, sys.executable, ROOT / "launch" / "reward_server.py", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )

    def wait(self):
        """Waits until it serves or ends."""
        self.line = self.process.stdout.readline().strip()
        self.port = int(self.line.rpartition(":")[2] or 0)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def log(self):
        return (self.folder / "stderr").read_text()

    def raw(self, *pieces, pause=0.0):
        """Returns the answer to bytes on a connection, until this is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as link:
            with contextlib.suppress(OSError):  # it has closed the connection
                for piece in pieces:
                    link.sendall(piece)
                    time.sleep(pause)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := link.recv(2**16):
                    answer += piece
            return answer

    def post(self, images, prompts, metadata=None):
        kind, body = encode_request(images, prompts, metadata or [{} for _ in prompts])
        headers = {"Content-Type": kind}
        return httpx.post(f"{self.url}/v1/score", content=body, headers=headers, timeout=60)

    def works(self):
        images = random_images(2)
        scores = self.post(images, ["a", "b"]).json()["scores"][NAME]
        healthy = httpx.get(f"{self.url}/health").json()["ok"]
        return healthy and np.allclose(scores, means(images), rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "served_rewards.py").write_text(REWARD)
    return folder


@pytest.fixture
def serve(folder):
    started = []

    def start(*arguments, reward=NAME, **options):
        started.append(Server(folder, f"--reward={reward}", *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@contextlib.contextmanager
def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join()


def wait_for(file, thread):
    while not file.exists():
        assert thread.is_alive()
        time.sleep(0.02)


def head_and_body(head=b"", body=b"", kind=b"multipart/form-data; boundary=x"):
    lines = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: " + kind + b"\r\n" + head
    return lines + b"\r\n" + body


def complete(images):
    kind, body = encode_request(images, ["a"], [{}])
    head = CLOSE + b"Content-Length: %d\r\n" % len(body)
    return head_and_body(head, body, kind.encode())


CLOSE = b"Connection: close\r\n"
HUGE = b"Content-Length: 100000000000\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"F4240\r\n" + bytes(10**6) + b"\r\n"
HTTP = b" HTTP/1.1\r\nHost: x\r\n"
GARBAGE = head_and_body(CLOSE + b"Content-Length: 5000\r\n", os.urandom(5000))


@pytest.mark.slow
def test_hostile_clients_do_not_stop_others_and_sigterm_finishes_accepted_requests(serve, tmp_path):
    server = serve("--port=0", "--upload=1", "--body=2000000", "--side=512").wait()
    assert server.works()
    requests = {
        "a slow head": ([b"GET /health HTTP/1.1\r\n", b"X: y\r\n"], 408),
        "garbage": ([os.urandom(5000)], None),  # with or without the end of a line
        "garbage after a head": ([GARBAGE], 400),
        "no HTTP": ([b"\x16\x03\x01\x02\x00" + os.urandom(200) + b"\r\n\r\n"], 400),
        "an endless head": ([b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000], 400),
        "two lengths": ([head_and_body(b"Content-Length: 1\r\nContent-Length: 2\r\n", b"a")], 400),
        "a huge length": ([head_and_body(HUGE, b"x" * 1000)], 413),
        "a huge length and its bytes": ([head_and_body(HUGE), *[bytes(10**6)] * 20], 413),
        "endless chunks": ([head_and_body(CHUNKED), *[CHUNK] * 20], 413),
        "an invalid chunk": ([head_and_body(CHUNKED, b"zz\r\n\r\n")], None),
        "a pickle": ([complete([b"\x80\x04\x95cos\nsystem\n(S'true'\ntR."])], 422),
        "a half body": ([complete(random_images(1))[:300]], 408),
        "a slow body": ([bytes([one]) for one in complete(random_images(1))[:400]], 408),
        "another path": ([b"GET /../etc/passwd" + HTTP + CLOSE + b"\r\n"], 404),
    }

    def send(name):
        start, pause = time.monotonic(), 0.01 if name == "a slow body" else 0.0
        return server.raw(*requests[name][0], pause=pause), time.monotonic() - start

    with ThreadPoolExecutor() as pool:  # some wait for seconds
        answers = dict(zip(requests, pool.map(send, requests), strict=True))
    assert answers["a slow head"][1] > 8
    for name, (_, status) in requests.items():
        answer = answers[name][0]
        found = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None
        assert found == status if status else 400 <= (found or 0) < 500, (name, answer[:300])
    stop = time.monotonic() + 1

    def bother(_):
        while time.monotonic() < stop:
            server.raw(head_and_body(b"Content-Length: 1000\r\n", b"x"), b"y", pause=0.1)

    with ThreadPoolExecutor(30) as pool:
        pool.map(bother, range(30))
        while time.monotonic() < stop:
            assert server.works()
    assert server.works() and "Traceback" not in server.log

    reward = RemoteReward([server.url], [NAME], retries=0)
    images, found, started = random_images(2), [], tmp_path / "started"
    metadata = [{"seconds": 1.0, "started": str(started)}] * 2
    with in_thread(lambda: found.append(reward(images, ["a", "b"], metadata))) as thread:
        wait_for(started, thread)
        assert server.end() == 0
    np.testing.assert_allclose(found[0][NAME], means(images), rtol=1e-5)
    with pytest.raises(Stopped, match=server.url):
        reward(images, ["a", "b"], [{}] * 2)


@pytest.mark.slow
def test_a_reward_that_hangs_or_dies_is_replaced_and_sigterm_waits_for_patience_only(
    serve, tmp_path
):
    server = serve("--port=0", "--host=0.0.0.0", "--score=5", "--patience=1").wait()
    assert "warning: --host=0.0.0.0" in server.log  # without a token
    for prompt, status in (("hang", 504), ("die", 500)):
        assert server.post(random_images(1), [prompt]).status_code == status
        assert server.works()
    started = tmp_path / "started"

    def hang():
        with pytest.raises(httpx.HTTPError):
            server.post(random_images(1), ["hang"], [{"started": str(started)}]).raise_for_status()

    with in_thread(hang) as thread:
        wait_for(started, thread)
        assert server.end() == 0


@pytest.mark.slow
def test_a_server_in_its_dry_run_refuses_requests_and_can_be_stopped(serve):
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    server, url = (
        serve(f"--port={port}", reward="served_rewards:never_ready"),
        f"http://127.0.0.1:{port}",
    )
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{url}/health")
            break
        time.sleep(0.1)
    reward = RemoteReward([url], [NAME], deadline=3.0, retries=1000)
    with pytest.raises(Stopped, match="503"):
        reward(random_images(1), ["a"], [{}])
    assert httpx.get(f"{url}/health").json()["ready"] is False
    assert server.end() == 0


@pytest.mark.slow
def test_a_failing_reward_is_an_error_and_a_dry_run_uses_records_of_the_prompts(serve, folder):
    failing = serve("--port=0", reward="served_rewards:needs_tag")
    assert failing.process.wait(60) == 2
    assert "KeyError: 'tag'" in failing.log and "--prompts" in failing.log
    assert "Traceback" not in failing.log
    (folder / "tags.jsonl").write_text('{"prompt": "a", "tag": "x"}\n')
    valid = serve("--port=0", "--prompts=tags.jsonl", reward="served_rewards:needs_tag").wait()
    assert "http://127.0.0.1:" in valid.line and valid.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_reward_processes_use_the_servers_of_a_config_and_their_token(serve, monkeypatch):
    server = serve("--port=0", "--host=0.0.0.0", DIGEN_REWARD_TOKEN="secret").wait()
    assert server.log == ""
    with pytest.raises(ConfigError, match="401"):
        RemoteReward([server.url]).check()
    monkeypatch.setenv("DIGEN_REWARD_TOKEN", "secret")
    settings = {"servers": (server.url,), "retries": 2, "attempt": 5.0}
    sections = [
        RewardSettings("served", settings=settings),
        RewardSettings("jpeg_compressibility", weight=0.5),
    ]
    images = random_images(5)
    batch = images, [f"prompt {i}" for i in range(5)], [{}] * 5
    with contextlib.closing(RewardPool(resolve(sections), 2)) as pool:
        columns = pool.score(*batch).columns
        np.testing.assert_allclose(columns[:, 0], means(images), rtol=1e-5)
        assert (columns[:, 1] < 0).all()
        own = ["ps", "-o", "pid=", "--ppid", str(server.process.pid)]
        children = subprocess.run(own, capture_output=True, text=True).stdout.split()
        server.process.kill()
        assert children and all(ends(int(child)) for child in children)
        with pytest.raises(Stopped, match=rf"{server.url} .*'prompt 0'"):
            pool.score(*batch)


def test_an_unavailable_address_is_refused():
    with listen("127.0.0.1", 0) as listener:
        used = listener.getsockname()[1]
        for host, port in (("127.0.0.1", used), ("127.0.0.1", 70_000), ("192.0.2.1", 0)):
            with pytest.raises(ConfigError, match=f"--port={port}"):
                listen(host, port)


def test_idle_connections_make_place_for_new_ones(serve):
    """A thousand for a server that may open 256 files; requests in flight are answered."""
    server = serve("--port=0", files=256).wait()

    def score(_):
        images, metadata = random_images(2), [{"seconds": 0.2}] * 2
        return server.post(images, ["a", "b"], metadata).status_code

    with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as stack:
        answers = [threads.submit(score, number) for number in range(3)]
        for _ in range(1000):
            link = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            stack.enter_context(link)
        assert server.works()
        assert [one.result() for one in answers] == [200] * 3
    assert server.log == ""


def test_a_server_with_too_few_files_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="64 files"):
        serve_here(Service(None, ()), listener, list, 1.0)
