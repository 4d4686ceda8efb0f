"""Reward servers under load: many clients, network faults, and a server that is killed and restarted."""

import dataclasses
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float32, Num, UInt8

from digen_jax.files import shipped
from digen_jax.images import to_uint8
from digen_jax.rewards import Exchange, alone, take_exchanges
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.service.client import RemoteReward

SERVER = shipped("launch/reward_server.py")
NAME = "benchmarks.rewards:fingerprint"
SCORED = "DIGEN_BENCHMARK_SCORED"  # folder where `fingerprint` records the images that it scored
BITS = 24  # float32 represents integers of this size exactly
# Share of the requests with each fault: delayed; an error instead of the server's answer; connection lost before the
# request is sent, or after the server's answer; an answer that is truncated, or whose scores are NaN or too few.
FAULTS = {"delay": 0.1, "error": 0.05, "disconnect": 0.05, "lost": 0.05, "corrupted": 0.05}
DELAY = 0.1  # maximum seconds
ERRORS = 500, 503, 429
CORRUPTED = (
    '{"scores": {"x',
    '{"scores": {}, "seconds": 1}',
    f'{{"scores": {{"{NAME}": [NaN]}}, "seconds": 1}}',
    f'{{"scores": {{"{NAME}": [1]}}, "seconds": 1}}',
    "<html>",
)
START, DEADLINE = 120.0, 300.0  # timeouts in seconds for a server's start, and for a request


def fingerprint(
    images: Num[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
) -> Float32[np.ndarray, "b"]:
    """Reward that differs for each image and prompt; it takes as long as the records state."""
    time.sleep(sum(record["seconds"] for record in metadata))
    if folder := os.environ.get(SCORED):
        with open(pathlib.Path(folder, str(os.getpid())), "a") as file:
            file.write("".join(f"{record['number']}\n" for record in metadata))
    return expected_scores(to_uint8(images), prompts)


def expected_scores(
    images: UInt8[np.ndarray, "b h w 3"], prompts: list[str]
) -> Float32[np.ndarray, "b"]:
    """Returns the scores of `fingerprint`."""
    pairs = zip(images, prompts, strict=True)
    sums = [zlib.crc32(prompt.encode(), zlib.crc32(image.tobytes())) for image, prompt in pairs]
    return np.asarray([one % 2**BITS for one in sums], np.float32)


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of all clients."""

    clients: int = 64
    servers: int = 3  # at least 2, because one is killed
    requests: int = 20  # per client
    images: int = 4  # per request
    side: int = 64
    seconds: float = 0.001  # duration of the reward per image
    seed: int = 0

    @property
    def total(self) -> int:
        """Total number of images."""
        return self.clients * self.requests * self.images

    def batch(self, client: int, number: int) -> tuple[Any, list[str], list[dict]]:
        """Returns (images, prompts, metadata) of a client's request; images are numbered over all requests."""
        first = (client * self.requests + number) * self.images
        rng = np.random.default_rng((self.seed, first))
        shape = (self.images, self.side, self.side, 3)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        numbers = range(first, first + self.images)
        prompts = [f"prompt {i}" for i in numbers]
        records = [dict(prompt=f"prompt {i}", number=i, seconds=self.seconds) for i in numbers]
        return images, prompts, records


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Throughput of scoring."""

    images: int
    seconds: float
    cpu: float  # seconds of the clients' process
    attempts: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # injected faults
    scorings: int = 0  # number of scored images, by all servers

    @property
    def milliseconds(self) -> float:
        """Milliseconds per image."""
        return 1000 * self.seconds / self.images

    def describe(self) -> str:
        """Returns a one-line summary."""
        return (
            f"{self.images / self.seconds:8.1f} images/s  {self.milliseconds:7.3f} ms per image, "
            f"{1000 * self.cpu / self.images:6.3f} ms CPU of the clients"
        )


@dataclasses.dataclass(frozen=True)
class ServiceComparison:
    """Results of the same requests with a pool in the clients' process, with servers, and with faults."""

    local: Throughput
    servers: Throughput
    faults: Throughput

    @property
    def overhead(self) -> float:
        """Milliseconds per image that servers take in addition to a pool."""
        return self.servers.milliseconds - self.local.milliseconds

    def describe(self) -> str:
        """Returns a table of the results."""
        failures = ", ".join(f"{n} {name}" for name, n in sorted(self.faults.failures.items()))
        return (
            f"local pool      {self.local.describe()}\n"
            f"servers         {self.servers.describe()}\n"
            f"with faults     {self.faults.describe()}\n"
            f"overhead of servers: {self.overhead:.3f} ms per image\n"
            f"faults: {failures}; one server was killed and restarted\n"
            f"each of {self.faults.images} images got exactly one score, the right one, in "
            f"{self.faults.attempts} attempts; servers scored {self.faults.scorings}"
        )


def compare(requests: Requests, log: Callable[[str], None]) -> ServiceComparison:
    """Sends all requests three times.

    Raises:
      RuntimeError: an image got no score, two scores, or a wrong one.
    """
    with closing(RewardPool(alone(NAME, fingerprint), requests.servers)) as pool:
        _warm_up(requests, pool.score)
        local = score_all(requests, lambda *batch: pool.score(*batch).columns[:, 0])
    log(f"local pool      {local.describe()}")
    servers = run_servers(requests, False)
    log(f"servers         {servers.describe()}")
    return ServiceComparison(local, servers, run_servers(requests, True))


def run_servers(requests: Requests, faults: bool) -> Throughput:
    """Scores with servers; `faults` uses a `FaultyNetwork` and kills the first server."""
    exchanges: list[Exchange] = []
    with ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        count = range(requests.servers)
        servers = [stack.enter_context(closing(ServerProcess(folder))) for _ in count]
        for server in servers:
            server.wait()
        network = FaultyNetwork(requests) if faults else None
        reward = RemoteReward(
            [f"http://127.0.0.1:{server.port}" for server in servers],
            [NAME],
            attempt=DEADLINE / 5,
            deadline=DEADLINE,
            retries=50,
            connections=requests.clients,
            blocked=(0.05, 1.0),
            pauses=(0.01, 0.2),
            transport=network,
        )
        _warm_up(requests, reward)
        take_exchanges()
        with _killed(servers[0], requests, exchanges) if faults else nullcontext():
            found = score_all(requests, lambda *batch: reward(*batch)[NAME])
        exchanges += take_exchanges()
        reward.close()
        files = [file for file in folder.iterdir() if file.suffix != ".jsonl"]
        lines = [line for file in files for line in file.read_text().splitlines()]
    scored = [line for line in lines if line != "-1"]
    if len(set(scored)) != requests.total:
        raise RuntimeError(f"the servers scored {len(set(scored))} of {requests.total} images")
    failures, attempts = dict(network.faults) if network else {}, len(exchanges)
    return dataclasses.replace(found, attempts=attempts, failures=failures, scorings=len(scored))


def score_all(requests: Requests, score: Callable[..., Float32[np.ndarray, "b"]]) -> Throughput:
    """Sends all clients' requests, with a thread per client, and checks each score."""
    found = np.full(requests.total, np.nan, np.float32)

    def client(which: int) -> None:
        for i in range(requests.requests):
            images, prompts, records = requests.batch(which, i)
            scores = score(images, prompts, records)
            numbers = [record["number"] for record in records]
            if not np.isnan(found[numbers]).all() or scores.shape != (len(numbers),):
                raise RuntimeError(f"images got more or fewer scores than one: {numbers}")
            if not np.array_equal(scores, expected_scores(images, prompts)):  # NaN is never equal
                raise RuntimeError(f"one of the images {numbers} got a wrong score: {scores}")
            found[numbers] = scores

    start, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(requests.clients) as clients:
        list(clients.map(client, range(requests.clients)))
    seconds, cpu = time.perf_counter() - start, time.process_time() - used
    return Throughput(requests.total, seconds, cpu)


class FaultyNetwork(httpx.HTTPTransport):
    """Network that delays, breaks and corrupts some requests and answers; `faults` counts them by kind."""

    def __init__(self, requests: Requests):
        super().__init__(limits=httpx.Limits(max_connections=requests.clients))
        self.faults: Counter[str] = Counter()
        self._random, self._lock = random.Random(requests.seed), threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request, or injects a fault."""
        with self._lock:
            (fault,) = self._random.choices(
                [*FAULTS, ""], [*FAULTS.values(), 1 - sum(FAULTS.values())]
            )
            seconds, status = self._random.uniform(0, DELAY), self._random.choice(ERRORS)
            content = self._random.choice(CORRUPTED)
            if fault:
                self.faults[fault] += 1
        if fault == "disconnect":
            raise httpx.WriteError("an injected fault", request=request)
        if fault == "error":
            return httpx.Response(status, headers={"Retry-After": "0"})
        if fault == "delay":
            time.sleep(seconds)
        response = super().handle_request(request)
        if fault in ("lost", "corrupted"):
            response.read()
            response.close()
        if fault == "lost":
            raise httpx.ReadError("an injected fault", request=request)
        return httpx.Response(200, content=content) if fault == "corrupted" else response


class ServerProcess:
    """Server in a separate process, whose port stays the same when it is restarted."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self.port = folder, 0
        self.start()

    def start(self) -> None:
        """Starts the server; `wait` waits until it serves."""
        prompts = self._folder / "prompts.jsonl"
        prompts.write_text('{"prompt": "a cat", "number": -1, "seconds": 0.0}\n')
        options = f"--reward={NAME}", f"--port={self.port}", f"--prompts={prompts}"
        self._process = subprocess.Popen(
            [sys.executable, SERVER, *options],
            env=os.environ | {SCORED: str(self._folder), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Waits for the line with its port."""
        late = threading.Timer(START, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        late.cancel()
        served = re.search(r":(\d+)$", line)
        if served is None:
            raise RuntimeError("a reward server has not started: see its output above")
        self.port = int(served[1])

    def kill(self) -> None:
        """Kills the server like the kernel's out-of-memory killer."""
        with self._process:
            self._process.kill()

    def close(self) -> None:
        """Ends the server by SIGTERM."""
        with self._process:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()


@contextmanager
def _killed(server: ServerProcess, requests: Requests, exchanges: list[Exchange]) -> Iterator[None]:
    """Kills a server when a third of the requests are answered, and restarts it at once."""
    ended, third = threading.Event(), requests.clients * requests.requests // 3

    def work() -> bool:
        while not ended.wait(0.005):
            exchanges.extend(take_exchanges())
            if sum(one.failure is None for one in exchanges) >= third:
                server.kill()
                server.start()
                server.wait()
                return True
        return False

    with ThreadPoolExecutor(1) as thread:
        restarted = thread.submit(work)
        try:
            yield
        finally:
            ended.set()
    if not restarted.result():
        raise RuntimeError("the requests ended before a server was killed")


def _warm_up(requests: Requests, score: Callable[..., Any]) -> None:
    """Requests scores that are not counted, so that everything has been started and imported."""
    images, prompts, records = requests.batch(0, 0)
    records = [record | {"number": -1} for record in records]
    for _ in range(2 * requests.servers):
        score(images, prompts, records)
