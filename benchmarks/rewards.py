"""A reward server under load: many clients, faults on the way, and a server that is killed and comes back."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float32, Num, UInt8

from benchmarks.faults import Faults, Proxy
from digen_jax.errors import ConfigError, check_positive
from digen_jax.files import shipped
from digen_jax.images import to_uint8
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.service.client import RemoteReward

SERVER = shipped("launch/reward_server.py")
NAME = "benchmarks.rewards:fingerprint"
SCORED = "DIGEN_BENCHMARK_SCORED"  # a folder in which `fingerprint` writes what it has scored
BITS = 24  # of whole numbers that float32 has exactly
START, DEADLINE = 120.0, 300.0  # seconds for a server's start, and for a request


def fingerprint(
    images: Num[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
) -> Float32[np.ndarray, "b"]:
    """A reward that is different for each image and prompt; it takes the seconds that a record says."""
    time.sleep(sum(record["seconds"] for record in metadata))
    if folder := os.environ.get(SCORED):
        with open(pathlib.Path(folder, str(os.getpid())), "a") as file:
            file.write("".join(f"{record['number']}\n" for record in metadata))
    return own_scores(to_uint8(images), prompts)


def own_scores(
    images: UInt8[np.ndarray, "b h w 3"], prompts: list[str]
) -> Float32[np.ndarray, "b"]:
    """What `fingerprint` gives."""
    pairs = zip(images, prompts, strict=True)
    sums = [zlib.crc32(prompt.encode(), zlib.crc32(image.tobytes())) for image, prompt in pairs]
    return np.float32([one % 2**BITS for one in sums])


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked for."""

    clients: int = 64
    servers: int = 3
    requests: int = 20  # of each client
    images: int = 4  # of a request
    side: int = 64
    seconds: float = 0.001  # of the reward for an image
    seed: int = 0

    @property
    def total(self) -> int:
        """All images."""
        return self.clients * self.requests * self.images

    def check(self) -> None:
        """Raises ConfigError where a number is too small."""
        for field in ("clients", "requests", "images", "side"):
            check_positive(f"--{field}", getattr(self, field))
        if self.servers < 2:
            raise ConfigError(f"--servers={self.servers} must be 2 or more: one of them is killed")

    def request(self, client: int, number: int) -> tuple[Any, list[str], list[dict]]:
        """(images, prompts, metadata) of a client's request; each image has a number of its own."""
        first = (client * self.requests + number) * self.images
        rng = np.random.default_rng((self.seed, first))
        shape = (self.images, self.side, self.side, 3)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        numbers = range(first, first + self.images)
        prompts = [f"prompt {i}" for i in numbers]
        records = [dict(prompt=f"prompt {i}", number=i, seconds=self.seconds) for i in numbers]
        return images, prompts, records


@dataclasses.dataclass(frozen=True)
class Speed:
    """How a load went; `describe` says it."""

    images: int
    seconds: float
    cpu: float  # seconds of the clients' process
    attempts: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # by what the proxies did
    scorings: int = 0  # of images, by all servers

    @property
    def each(self) -> float:
        """Milliseconds an image."""
        return 1000 * self.seconds / self.images

    def describe(self) -> str:
        """A line."""
        return (
            f"{self.images / self.seconds:8.1f} images/s  {self.each:7.3f} ms an image, "
            f"{1000 * self.cpu / self.images:6.3f} ms CPU of the clients"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The same load on a pool in the clients' process, on servers, and on servers with faults."""

    local: Speed
    servers: Speed
    faults: Speed

    @property
    def overhead(self) -> float:
        """Milliseconds an image that servers take in addition to a pool's."""
        return self.servers.each - self.local.each

    def describe(self) -> str:
        """The table."""
        made = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.failures.items()))
        return "\n".join(
            [
                f"local pool      {self.local.describe()}",
                f"servers         {self.servers.describe()}",
                f"with faults     {self.faults.describe()}",
                f"overhead of servers: {self.overhead:.3f} ms an image",
                f"faults: {made}; one server was killed and started again",
                f"{self.faults.images} images got exactly one score each, their own, in "
                f"{self.faults.attempts} attempts; servers scored {self.faults.scorings}",
            ]
        )


def compare(load: Load, told: Callable[[str], None] = print) -> Comparison:
    """Runs the load three times.

    Raises:
      RuntimeError: an image got no score, two scores, or another one's.
    """
    load.check()
    local = run_local(load)
    told(f"local pool      {local.describe()}")
    with tempfile.TemporaryDirectory() as folder:
        clean = run_remote(load, pathlib.Path(folder), None)
    told(f"servers         {clean.describe()}")
    with tempfile.TemporaryDirectory() as folder:
        faulty = run_remote(load, pathlib.Path(folder), Faults())
    return Comparison(local, clean, faulty)


def run_local(load: Load) -> Speed:
    """The load on a pool with as many processes as there are servers."""
    pool = RewardPool(alone(NAME, fingerprint), load.servers)
    try:
        _warm(load, pool.score)
        return drive(load, lambda *batch: pool.score(*batch).columns[:, 0])
    finally:
        pool.close()


def run_remote(load: Load, folder: pathlib.Path, faults: Faults | None) -> Speed:
    """The load on servers; with faults on the way to each, and a kill of the first server."""
    servers = [ServerProcess(folder) for _ in range(load.servers)]
    proxies: list[Proxy] = []
    exchanges: list[Any] = []
    try:
        for server in servers:
            server.wait()
        ports = [server.port for server in servers]
        if faults is not None:
            proxies = [Proxy(port, faults, NAME, load.seed + port) for port in ports]
            ports = [proxy.port for proxy in proxies]
        reward = RemoteReward(
            [f"http://127.0.0.1:{port}" for port in ports],
            [NAME],
            attempt=DEADLINE / 5,
            deadline=DEADLINE,
            retries=50,
            connections=load.clients,
            blocked=(0.05, 1.0),
            pauses=(0.01, 0.2),
            listener=exchanges.append,
        )
        _warm(load, reward)
        exchanges.clear()
        killing = _killed(servers[0], load, exchanges) if faults is not None else _nothing()
        with killing:
            speed = drive(load, lambda *batch: reward(*batch)[NAME])
        reward.close()
    finally:
        for proxy in proxies:
            proxy.close()
        for server in servers:
            server.close()
    made = sum((proxy.made for proxy in proxies), Counter())
    made.pop("none", None)
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
    scored = [line for line in lines if line != "-1"]
    if len(set(scored)) != load.total:
        raise RuntimeError(f"the servers scored {len(set(scored))} of {load.total} images")
    return dataclasses.replace(
        speed, attempts=len(exchanges), failures=dict(made), scorings=len(scored)
    )


def drive(load: Load, score: Callable[..., Float32[np.ndarray, "b"]]) -> Speed:
    """All clients' requests, a thread each, and a check of each score."""
    found = np.full(load.total, np.nan, np.float32)
    expected = np.full(load.total, np.nan, np.float32)
    errors: list[BaseException] = []

    def client(which: int) -> None:
        try:
            for i in range(load.requests):
                images, prompts, records = load.request(which, i)
                scores = score(images, prompts, records)
                where = [record["number"] for record in records]
                if not np.isnan(found[where]).all() or scores.shape != (len(where),):
                    raise RuntimeError(f"an image got another score: {where}")
                found[where], expected[where] = scores, own_scores(images, prompts)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(which,)) for which in range(load.clients)]
    begin, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    if errors:
        raise errors[0]
    wrong = np.flatnonzero(~(found == expected))  # NaN equals nothing
    if len(wrong):
        raise RuntimeError(f"{len(wrong)} images have not their own score, image {wrong[0]} first")
    return Speed(load.total, seconds, cpu)


class ServerProcess:
    """A server of its own, whose port stays the same when it is started again."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self.port = folder, 0
        self.start()

    def start(self) -> None:
        """Starts it; `wait` waits until it serves."""
        prompts = self._folder.parent / f"{self._folder.name}.jsonl"
        prompts.write_text('{"prompt": "a cat", "number": -1, "seconds": 0.0}\n')
        self._process = subprocess.Popen(
            [
                *(sys.executable, SERVER, f"--reward={NAME}", f"--port={self.port}"),
                f"--prompts={prompts}",
            ],
            env=os.environ | {SCORED: str(self._folder), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Waits for its line, which tells its port."""
        late = threading.Timer(START, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        served = re.search(r":(\d+)$", line)
        if served is None:
            raise RuntimeError("a reward server has not started: what it says stands above")
        self.port = int(served[1])

    def kill(self) -> None:
        """Ends it as the kernel does for want of memory."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def close(self) -> int:
        """Ends it as a user does; returns its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._process.stdout.close()


@contextmanager
def _killed(server: ServerProcess, load: Load, exchanges: list) -> Iterator[None]:
    """Kills a server when a third of the requests are answered, and starts it again at once."""
    ended, errors = threading.Event(), []

    def work() -> None:
        third = load.clients * load.requests // 3
        while not ended.wait(0.005):
            if sum(one.failure is None for one in list(exchanges)) >= third:
                server.kill()
                server.start()
                server.wait()
                return
        errors.append(RuntimeError("the load ended before a server was killed"))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _warm(load: Load, score: Callable[..., Any]) -> None:
    """Asks for scores that do not count, so that everything has been started and imported."""
    images, prompts, records = load.request(0, 0)
    records = [record | {"number": -1} for record in records]
    for _ in range(2 * load.servers):
        score(images, prompts, records)
