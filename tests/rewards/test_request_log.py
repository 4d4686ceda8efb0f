"""The timeline's rows for servers of rewards: over real sockets, and in a run with real servers."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from digen_jax.logging.report_run import read_run, timeline
from digen_jax.logging.timeline import read_events
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.service.wire import Limits, decode_request
from tests.rewards.service.helpers import random_images
from tests.run.test_train import config, train  # noqa: F401

PAUSE = 0.05  # seconds that a stub takes for an answer


class Handler(BaseHTTPRequestHandler):
    """A reward server and an OpenAI-compatible one, with constant answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        limits = {"images": 4, "pixels": 2**20}
        answer = {"data": [{"id": "m"}], "version": 1, "rewards": ["mean"], "limits": limits}
        self.answer(answer)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(PAUSE)
        if self.path.endswith("completions"):
            return self.answer({"choices": [{"message": {"content": "Score: 5"}}]})
        count = len(decode_request(self.headers["Content-Type"], body, Limits()).prompts)
        return self.answer({"scores": {"mean": [0.5] * count}, "seconds": PAUSE})

    def answer(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def stub():
    """The address of such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def scored(processes, *asked, count=6):
    """(start, the exchanges of one batch, end), after a first batch."""
    pool = RewardPool(resolve(asked), processes)
    batch = random_images(count), [f"prompt {i}" for i in range(count)], [{}] * count
    try:
        pool.score(*batch)
        begin = time.perf_counter()
        found = pool.submit(*batch).result().exchanges
        return begin, found, time.perf_counter()
    finally:
        pool.close()


def most_at_once(found):
    """Returns the largest number of intervals that overlap."""
    changes = sorted([(one.begin, 1) for one in found] + [(one.end, -1) for one in found])
    return max(np.cumsum([change for _, change in changes]))


@pytest.mark.parametrize("processes", [0, 1])
def test_requests_of_a_process_have_their_times(processes):
    with stub() as first, stub() as second:
        begin, found, end = scored(
            processes,
            RewardSettings("served", settings={"servers": (first,)}),
            RewardSettings("served", settings={"servers": (second,)}, label="other"),
            RewardSettings("jpeg_compressibility", weight=0.1),
        )
    rows = [f"reward server {address.removeprefix('http://')}" for address in (first, second)]
    # Each server takes four images a request.
    assert [(one.server, one.images) for one in found] == [
        (row, count) for row in rows for count in (4, 2)
    ]
    assert all(one.end - one.begin >= PAUSE and one.failure is None for one in found)
    times = [begin, *(moment for one in found for moment in (one.begin, one.end)), end]
    assert times == sorted(times)


def test_a_judge_has_as_many_requests_in_flight_as_connections():
    with stub() as address:
        settings = {"servers": (address,), "connections": 3, "template": "rating"}
        begin, found, end = scored(0, RewardSettings("judge", settings=settings), count=9)
    assert {one.server for one in found} == {f"judge {address.removeprefix('http://')}"}
    assert len(found) == 9 and most_at_once(found) == 3
    assert all(begin <= one.begin < one.end <= end for one in found)


def test_failed_requests_are_recorded():
    # Bound, so that no other process gets the port, and not listening.
    with socket.socket() as nobody, stub() as address:
        nobody.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        settings = {"servers": (f"http://{dead}", address)}
        pool = RewardPool(resolve([RewardSettings("served", settings=settings)]), 0)
        found = pool.submit(random_images(1), ["a"], [{}]).result().exchanges
        pool.close()
    assert found[0].server == f"reward server {dead}"
    assert found[0].failure and found[-1].failure is None


@pytest.mark.slow
def test_a_run_shows_a_row_for_each_server(tmp_path, train):  # noqa: F811
    """Two servers, called for chunks and evaluations by processes of the run."""
    with stub() as first, stub() as second:
        asked = tuple(
            dict(name="served", label=label, settings=dict(servers=(address,)))
            for label, address in (("one", first), ("two", second))
        )
        run = config(tmp_path, rewards=asked, reward_pool__processes=2, sampler__chunk=4)
        assert train("run", run) is None
    found = timeline(read_run(tmp_path / "run"))
    rows = {f"reward server {address.removeprefix('http://')}" for address in (first, second)}
    assert set(found["rows"][-2:]) == rows and found["rows"][-3] == "reward"
    kind = [name for name, _ in found["kinds"]].index("request")
    for row in rows:
        own = [span for span in found["spans"] if found["rows"][span[0]] == row]
        assert {span[1] for span in own} == {kind} and len(own) >= 8
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"evaluation/reward_of/one", "evaluation/reward_of/two"} <= line.keys()
    steps = {step for step, *_ in found["steps"]}
    for event in read_events(tmp_path / "run" / "timeline.json"):
        if event["name"] == "request" and event["args"]:  # evaluations are no part of a step
            assert event["args"]["step"] + 1 in steps
