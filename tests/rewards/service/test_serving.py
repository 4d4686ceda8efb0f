"""Real servers and sockets: hostile senders, signals, ports, and what a client sees of a killed server."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.service.client import RemoteReward
from digen_jax.rewards.service.server import listen
from digen_jax.rewards.service.wire import encode_request
from digen_jax.rewards.settings import RewardSettings
from tests.pipelines import ROOT
from tests.rewards.service.helpers import means, random_images
from tests.scripts import ends

REWARD = """
import os, time
import numpy as np

def mean(images, prompts, metadata):
    for record in metadata:
        if "begun" in record:
            open(record["begun"], "w").close()
    if "hang" in prompts:
        time.sleep(600)
    if "die" in prompts:
        os._exit(3)
    time.sleep(sum(record.get("seconds", 0) for record in metadata))
    images = np.asarray(images, np.float32)
    if images.max() > 1:
        images = images / 255
    return images.reshape(len(images), -1).mean(1)

def never_ready(images, prompts, metadata):
    time.sleep(600)

def needs_tag(images, prompts, metadata):
    return [len(record["tag"]) for record in metadata]
"""
NAME = "served_rewards:mean"


class Served:
    """A server's process."""

    def __init__(self, folder, *arguments, **environment):
        files = environment.pop("FILES", None)  # that it may open
        limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash"] if files else []
        self.process = subprocess.Popen(
            [*limited, sys.executable, ROOT / "launch" / "reward_server.py", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )
        self.folder = folder

    def wait(self):
        self.line = self.process.stdout.readline().strip()
        self.url = self.line.rpartition(" ")[2]
        self.port = int(self.url.rpartition(":")[2] or 0) if self.url else 0
        return self

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def said(self):
        return (self.folder / "stderr").read_text()

    def raw(self, *pieces, pause=0.0):
        """What it answers to bytes on a connection, to its end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as link:
            try:
                for piece in pieces:
                    link.sendall(piece)
                    time.sleep(pause)
            except OSError:
                pass  # it has ended the connection
            answer = b""
            try:
                while piece := link.recv(2**16):
                    answer += piece
            except ConnectionResetError:
                pass
            return answer

    def well(self):
        """Whether it scores rightly."""
        images = random_images(2)
        kind, body = encode_request(images, ["a", "b"], [{}, {}])
        headers = {"Content-Type": kind}
        response = httpx.post(f"{self.url}/v1/score", content=body, headers=headers, timeout=30)
        scores = response.json()["scores"][NAME]
        healthy = httpx.get(f"{self.url}/health").json()["ok"]
        return healthy and np.allclose(scores, means(images), rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "served_rewards.py").write_text(REWARD)
    return folder


@pytest.fixture
def serve(folder):
    begun = []

    def start(*arguments, **environment):
        begun.append(Served(folder, f"--reward={NAME}", *arguments, **environment))
        return begun[-1].wait()

    yield start
    for one in begun:
        one.process.kill()
        one.process.wait()


def post(head=b"", body=b"", kind=b"multipart/form-data; boundary=x"):
    lines = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: " + kind + b"\r\n" + head
    return lines + b"\r\n" + body


def bomb():
    """A PNG file of 20 kB whose picture would have 4 GB."""

    def chunk(kind, content):
        end = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + end

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(20_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def whole(images, prompts=("a",)):
    kind, body = encode_request(images, list(prompts), [{} for _ in prompts])
    head = CLOSE + b"Content-Length: %d\r\n" % len(body)
    return post(head, body, kind.encode())


CLOSE = b"Connection: close\r\n"
HUGE = b"Content-Length: 100000000000\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.slow
def test_hostile_requests_get_a_4xx_and_leave_the_server_well(serve):
    server = serve("--port=0", "--upload=1", "--body=2000000", "--side=512")
    assert server.well()
    requests = {
        "a slow head": ([b"GET /health HTTP/1.1\r\n", b"X: y\r\n"], 408),
        "garbage": ([os.urandom(5000)], None),  # with or without the end of a line
        "garbage after a head": (
            [post(CLOSE + b"Content-Length: 5000\r\n", os.urandom(5000))],
            400,
        ),
        "no HTTP": ([b"\x16\x03\x01\x02\x00" + os.urandom(200) + b"\r\n\r\n"], 400),
        "an endless head": ([b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000], 400),
        "two lengths": ([post(b"Content-Length: 1\r\nContent-Length: 2\r\n", b"ab")], 400),
        "a negative length": ([post(b"Content-Length: -1\r\n")], 400),
        "a huge length": ([post(HUGE, b"x" * 1000)], 413),
        "a huge length and its bytes": ([post(HUGE), *[bytes(10**6)] * 20], 413),
        "endless chunks": ([post(CHUNKED), *[b"F4240\r\n" + bytes(10**6) + b"\r\n"] * 20], 413),
        "a wrong chunk": ([post(CHUNKED, b"zz\r\n\r\n")], None),
        "a wrong type": ([post(b"Content-Length: 2\r\n", b"{}", b"application/json")], 415),
        "no type": ([b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"], 415),
        "a pickle": ([whole([b"\x80\x04\x95cos\nsystem\n(S'true'\ntR."])], 422),
        "a bomb": ([whole([bomb()])], 413),
        "a large side": ([whole(np.zeros((1, 2, 513, 3), np.uint8))], 413),
        "a half body": ([whole(random_images(1))[:300]], 408),
        "a slow body": ([bytes([one]) for one in whole(random_images(1))[:400]], 408),
        "another path": (
            [b"GET /../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"],
            404,
        ),
        "another method": (
            [b"DELETE /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"],
            405,
        ),
    }

    def sent(name):
        begin, pause = time.monotonic(), 0.01 if name == "a slow body" else 0.0
        return server.raw(*requests[name][0], pause=pause), time.monotonic() - begin

    with ThreadPoolExecutor() as pool:  # some wait for seconds
        answers = dict(zip(requests, pool.map(sent, requests), strict=True))
    assert answers["a slow head"][1] > 8
    for name, (_, status) in requests.items():
        answer = answers[name][0]
        found = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None
        assert found == status if status else 400 <= (found or 0) < 500, (name, answer[:300])
    with httpx.Client() as client:  # an open connection may wait between two requests
        assert client.get(f"{server.url}/health").status_code == 200
    assert server.well()
    assert server.end() == 0
    assert "Traceback" not in server.said


@pytest.mark.slow
def test_many_hostile_senders_at_once_do_not_stop_others(serve):
    server = serve("--port=0", "--upload=1", "--body=200000")
    stop = time.monotonic() + 1

    def bother():
        while time.monotonic() < stop:
            server.raw(post(b"Content-Length: 1000\r\n", b"x"), b"y", pause=0.1)

    threads = [threading.Thread(target=bother) for _ in range(30)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop:
        assert server.well()
    for thread in threads:
        thread.join()
    assert server.well() and server.end() == 0


@pytest.mark.slow
def test_sigterm_finishes_what_was_accepted(serve, tmp_path):
    server = serve("--port=0")
    reward = RemoteReward([server.url], [NAME], retries=0)
    images, found, begun = random_images(2), [], tmp_path / "begun"

    def ask():
        found.append(reward(images, ["a", "b"], [{"seconds": 1.0, "begun": str(begun)}] * 2))

    thread = threading.Thread(target=ask)
    thread.start()
    while not begun.exists():
        assert thread.is_alive()
        time.sleep(0.02)
    assert server.end() == 0
    thread.join()
    np.testing.assert_allclose(found[0][NAME], means(images), rtol=1e-5)
    with pytest.raises(Stopped, match=server.url):
        reward(images, ["a", "b"], [{}] * 2)


@pytest.mark.slow
def test_a_server_in_its_trial_refuses_and_can_be_stopped(folder):
    with listen("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
    server = Served(folder, "--reward=served_rewards:never_ready", f"--port={port}")
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        time.sleep(0.1)
    reward = RemoteReward([f"http://127.0.0.1:{port}"], [NAME], deadline=3.0, retries=1000)
    with pytest.raises(Stopped, match="503"):
        reward(random_images(1), ["a"], [{}])
    assert httpx.get(f"http://127.0.0.1:{port}/health").json()["ready"] is False
    assert server.end() == 0


@pytest.mark.slow
def test_sigterm_does_not_wait_for_ever(serve, tmp_path):
    server, begun = serve("--port=0", "--patience=1"), tmp_path / "begun"
    kind, body = encode_request(random_images(1), ["hang"], [{"begun": str(begun)}])

    def ask():
        with pytest.raises(httpx.HTTPError):
            httpx.post(
                f"{server.url}/v1/score", content=body, headers={"Content-Type": kind}, timeout=60
            ).raise_for_status()

    thread = threading.Thread(target=ask)
    thread.start()
    while not begun.exists():
        assert thread.is_alive()
        time.sleep(0.02)
    assert server.end() == 0
    thread.join()


@pytest.mark.slow
def test_a_reward_that_hangs_or_dies_is_replaced(serve):
    server = serve("--port=0", "--score=5")
    for prompt, status in (("hang", 504), ("die", 500)):
        kind, body = encode_request(random_images(1), [prompt], [{}])
        headers = {"Content-Type": kind}
        response = httpx.post(f"{server.url}/v1/score", content=body, headers=headers, timeout=30)
        assert response.status_code == status
        assert server.well()


@pytest.mark.slow
def test_a_killed_server_leaves_no_process(serve):
    server = serve("--port=0")
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    )
    children = [int(pid) for pid in listed.stdout.split()]
    assert children
    server.end(signal.SIGKILL)
    assert all(ends(child) for child in children)


@pytest.mark.slow
def test_a_port_in_use_and_a_wrong_reward_are_one_sentence(serve, folder):
    server = serve("--port=0")
    second = Served(folder, f"--reward={NAME}", f"--port={server.port}")
    assert second.process.wait(60) == 2
    assert second.said.startswith(f"reward_server.py: --host=127.0.0.1 --port={server.port} cannot")
    assert len(second.said.splitlines()) == 1
    wrong = Served(folder, "--reward=served_rewards:needs_tag", "--port=0")
    assert wrong.process.wait(60) == 2
    assert "raised KeyError: 'tag'" in wrong.said and "give one by --prompts" in wrong.said
    assert "Traceback" not in wrong.said
    (folder / "tags.jsonl").write_text('{"prompt": "a", "tag": "x"}\n')
    # the trial takes a record of each kind
    right = Served(folder, "--reward=served_rewards:needs_tag", "--port=0", "--prompts=tags.jsonl")
    assert right.wait().line.startswith(
        "reward 'served_rewards:needs_tag' is served at http://127.0.0.1:"
    )
    assert right.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_an_open_address_without_a_token_is_warned_of(serve):
    server = serve("--port=0", "--host=0.0.0.0")
    assert "warning: --host=0.0.0.0 is open to the network, and there is no token" in server.said
    with_token = serve("--port=0", "--host=0.0.0.0", DIGEN_REWARD_TOKEN="secret")
    assert with_token.said == ""
    url = f"http://127.0.0.1:{with_token.port}"
    with pytest.raises(ConfigError, match="401"):
        RemoteReward([url]).check()
    reward = RemoteReward([url], [NAME], token="secret")
    assert reward.check()[url]["rewards"] == [NAME]
    images = random_images(2)
    scores = reward(images, ["a", "b"], [{}] * 2)[NAME]
    np.testing.assert_allclose(scores, means(images), rtol=1e-5)


@pytest.mark.slow
def test_a_config_names_servers_and_its_processes_ask_them(serve, monkeypatch):
    server = serve("--port=0", DIGEN_REWARD_TOKEN="secret")
    monkeypatch.setenv("DIGEN_REWARD_TOKEN", "secret")
    address, images = f"http://127.0.0.1:{server.port}", random_images(5)
    settings = {"servers": (address,), "retries": 2, "attempt": 5.0}
    asked = [
        RewardSettings("served", settings=settings),
        RewardSettings("jpeg_compressibility", weight=0.5),
    ]
    pool = RewardPool(resolve(asked), 2)
    try:
        batch = images, [f"prompt {i}" for i in range(5)], [{}] * 5
        columns = pool.score(*batch).columns
        np.testing.assert_allclose(columns[:, 0], means(images), rtol=1e-5)
        assert (columns[:, 1] < 0).all()
        server.process.kill()
        with pytest.raises(
            Stopped, match=rf"{address} .*\(prompt 'prompt 0'\).*same command continues"
        ):
            pool.score(*batch)
    finally:
        pool.close()


def test_servers_are_given_as_addresses():
    with pytest.raises(ConfigError, match=r"rewards\[0\]: the reward 'served' has no servers"):
        resolve([RewardSettings("served")])
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1:8100' is no address of a reward server"):
        resolve([RewardSettings("served", settings={"servers": "127.0.0.1:8100"})])


def test_a_socket_that_cannot_be_had_is_a_sentence():
    with listen("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port} cannot be used .*in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--port=70000"):
        listen("127.0.0.1", 70_000)
    with pytest.raises(ConfigError, match=r"--host=192\.0\.2\.1"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("busy", [0, 3])
def test_idle_connections_make_place_for_new_ones(serve, busy):
    """A thousand for a server that may open 256 files; requests in flight are answered."""
    served = serve(FILES=256)
    images = random_images(2)
    metadata = [{"seconds": 0.2}] * 2
    kind, body = encode_request(images, ["a", "b"], metadata)

    def ask(_):
        url, headers = f"{served.url}/v1/score", {"Content-Type": kind}
        return httpx.post(url, content=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as stack:
        asked = [threads.submit(ask, number) for number in range(busy)]
        for _ in range(1000):
            link = socket.create_connection(("127.0.0.1", served.port), timeout=30)
            stack.enter_context(link)
        assert served.well()
        assert [one.result() for one in asked] == [200] * busy
    assert served.said == ""


def test_a_server_with_too_few_files_is_refused(serve):
    served = serve(FILES=64)
    assert served.process.wait(60) == 2
