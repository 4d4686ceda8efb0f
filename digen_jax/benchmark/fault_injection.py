"""A real run of several processes in which faults of random kinds happen, and what follows each of them."""

import dataclasses
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable

from digen_jax.benchmark.equality import STEP as STEP_OF
from digen_jax.benchmark.equality import lines, steps
from digen_jax.benchmark.job import Begun, Job, Wrong, memory
from digen_jax.process.ending import STOPPED
from digen_jax.records.metrics import CLOCK

# Seconds: without a word from a mesh until it is lost, for all to end without the leader, for a step with a start
# before it, and for a process to end.
SILENCE, LEADERLESS, STEP, END = 8.0, 10.0, 300.0, 60.0
BUSY = 5.0  # seconds that a busy machine may take in addition
ENDLESS = 10**6  # steps of a run that a signal ends
WORKERS, ADDED = 2, "added"
HURRY = 0.25  # share of the faults after which the next one does not wait


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and its consequences; seconds are None where another fault came before.

    Attributes:
      kind: a key of `FaultInjection.kinds`.
      went_on: seconds until a step that began after the fault had ended.
      whole: seconds until all meshes were there.
      ended: seconds until all processes had ended, where the trainer was killed.
    """

    kind: str
    went_on: float | None
    whole: float | None
    ended: float | None = None


class FaultInjection:
    """A job in which faults happen.

    Attributes:
      faults: those that have happened.
      memory: the largest bytes of the leader and of a rollout process so far.
      kinds: how often each happens among others, and what makes it happen; False: it cannot at present.
    """

    def __init__(
        self, job: Job, workdir: pathlib.Path, seed: int, told: Callable[[str], None] = print
    ):
        self.faults: list[Fault] = []
        self.memory = {"the leader": 0, "a rollout process": 0}
        self._job, self._workdir, self._told = job, workdir, told
        self._random = random.Random(seed)
        self._ended: float | None = None
        self._left: int | None = None  # the steps of the metrics when the trainer ended
        self._expected: dict[Begun, set[int]] = {}  # exit codes of processes that may have ended
        self._added = 0
        self.kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "rollout process killed": (4, self._kill),
            "all rollout processes killed": (1, self._kill_all),
            "rollout process stopped, goes on too late": (2, self._stop),
            "rollout process stopped, then killed": (1, self._stop_and_kill),
            "rollout process replaced while stopped": (1, self._replace),
            "rollout process asked to end": (2, self._ask),
            "mesh added, or killed if it is there": (3, self._add),
            "reward's process killed": (3, self._kill_reward),
            "trainer's process killed": (2, self._kill_trainer),
            "trainer's process asked to end": (1, self._ask_trainer),
        }

    def begin(self) -> None:
        """Starts the job, and waits for its second step."""
        self._job.start_all(f"--config.steps={ENDLESS}")
        self._wait_for(2)
        self._job.wait(self._whole, STEP, "all meshes are ready")

    def next(self) -> Fault:
        """A fault of a random kind after a random time, and what follows.

        Raises:
          Wrong: it had a consequence that it must not have.
        """
        self._sleep(self._random.uniform(0, 4))
        hurry = self._random.random() < HURRY
        while True:  # some kinds need what is not always there
            names, weights = zip(*((k, w) for k, (w, _) in self.kinds.items()), strict=True)
            kind = self._random.choices(names, weights)[0]
            done, begin, self._ended, self._left = self._done(), time.time(), None, None
            if self.kinds[kind][1]():
                break
            self._sleep(0.5)
        # The step after the one in progress, or the first one that a new trainer adds.
        count = done + 2 if self._left is None else self._left + 1
        seconds = (None, None) if hurry else self._aftermath(begin, count)
        fault = Fault(kind, *seconds, self._ended)
        self.check()
        self.faults.append(fault)
        shown = "the next one follows" if hurry else f"went on after {seconds[0]:.1f} s"
        self._told(f"{len(self.faults)}: in step {done + 1}: {kind}: {shown}")
        return fault

    def check(self) -> None:
        """Raises Wrong where a process is left or has ended as it must not, or a step is missing or there twice."""
        self._job.check_no_orphans()
        self._check_steps()
        self._measure()
        for one in self._job.all:
            code = one.process.poll()
            if code is not None and code not in self._expected.get(one, {None}):
                raise Wrong(f"{one.name} has ended with {code}; it said:\n{one.said()[-3000:]}")
            if "Traceback" in one.said():
                raise Wrong(f"{one.name} has a traceback:\n{one.said()[-3000:]}")

    def conclude(self) -> int:
        """Stops the job, and continues it to its end, with two more steps; returns the number of all.

        Raises:
          Wrong: as `next`.
        """
        self._ask_trainer(start=False)
        last = self._done() + 2
        self._start_all(last)
        for one in (self._job.leader, *self._job.meshes()):
            self._expect(one, 0)
            one.ends(STEP)
        self.check()
        if self._done() != last:
            raise Wrong(f"the run has ended after {self._done()} steps of {last}")
        return last

    # ------------------------------------------------------------------------------- the faults

    def _kill(self) -> bool:
        return self._killed(self._victim(self._job.meshes()))

    def _killed(self, one: Begun | None) -> bool:
        if one is None:
            return False
        self._expect(one, -signal.SIGKILL)
        one.signal(signal.SIGKILL)
        one.ends(END)
        self._again(one.name)
        return True

    def _kill_all(self) -> bool:
        """The trainer generates until one is back."""
        meshes = self._job.meshes()
        for one in meshes:
            self._expect(one, -signal.SIGKILL)
            one.signal(signal.SIGKILL)
        for one in meshes:
            one.ends(END)
        for one in meshes:
            self._again(one.name)
        return bool(meshes)

    def _stop(self) -> bool:
        one = self._stopped()
        if one is None:
            return False
        self._expect(one, STOPPED)
        one.signal(signal.SIGCONT)
        one.ends(LEADERLESS + BUSY)
        self._again(one.name)
        return True

    def _stop_and_kill(self) -> bool:
        return self._killed(self._stopped())

    def _replace(self) -> bool:
        """The other one of the same name waits until the stopped one is lost."""
        one = self._victim([one for one in self._ready() if one.name in self._job.rollouts])
        if one is None:
            return False
        one.signal(signal.SIGSTOP)
        self._again(one.name)
        self._job.wait(lambda: self._job.now[one.name].joined, STEP, f"another {one.name} joins")
        self._expect(one, STOPPED)
        one.signal(signal.SIGCONT)
        one.ends(LEADERLESS + BUSY)
        return True

    def _ask(self) -> bool:
        one = self._victim(self._ready())
        if one is None:
            return False
        self._expect(one, 0)
        one.signal(signal.SIGTERM)
        one.ends(END)
        self._again(one.name)
        return True

    def _add(self) -> bool:
        there = [one for one in self._job.meshes() if one.name.startswith(ADDED)]
        if there:
            return self._killed(there[0])
        self._added += 1
        self._job.start(f"{ADDED} {self._added}", f"--config.steps={ENDLESS}")
        return True

    def _kill_reward(self) -> bool:
        of = self._victim([self._job.leader, *self._ready()])
        found = self._job.rewards(of)
        if not found:
            return False
        os.kill(self._random.choice(found), signal.SIGKILL)
        return True

    def _kill_trainer(self) -> bool:
        leader, meshes = self._job.leader, self._job.meshes()
        joined = [one for one in meshes if one.joined]
        for one in meshes:
            # One that has not joined yet waits for a leader, and would join the next one.
            self._expect(one, *((STOPPED,) if one in joined else (STOPPED, 2, -signal.SIGKILL)))
        self._expect(leader, -signal.SIGKILL)
        begin = time.monotonic()
        leader.signal(signal.SIGKILL)
        for one in joined:
            one.ends(max(0.1, begin + LEADERLESS + BUSY - time.monotonic()))
        self._ended = time.monotonic() - begin if joined else None
        for one in meshes:
            if one.alive:
                one.signal(signal.SIGKILL)
                one.ends(END)
        leader.ends(END)
        self._start_all(ENDLESS)
        return True

    def _ask_trainer(self, start: bool = True) -> bool:
        leader, meshes = self._job.leader, self._job.meshes()
        self._job.wait(lambda: self._done() > 0 and all(m.joined for m in meshes), STEP, "all join")
        self._expect(leader, 128 + signal.SIGTERM)
        for one in meshes:
            self._expect(one, 0, STOPPED)
        before = self._done()
        leader.signal(signal.SIGTERM)
        if leader.ends(STEP) != 128 + signal.SIGTERM:
            raise Wrong(f"the leader has ended with {leader.process.returncode}:\n{leader.said()}")
        for one in meshes:
            one.ends(LEADERLESS + BUSY)
        if self._done() < before:
            raise Wrong("a stopped run has lost a step")
        if start:
            self._start_all(ENDLESS)
        return True

    # ------------------------------------------------------------------------------ what it uses

    def _stopped(self) -> Begun | None:
        """A process that was stopped for longer than the silence."""
        one = self._victim(self._ready())
        if one is not None:
            one.signal(signal.SIGSTOP)
            self._sleep(SILENCE + self._random.uniform(1, 3))
        return one

    def _victim(self, of: list[Begun]) -> Begun | None:
        return self._random.choice(of) if of else None

    def _ready(self) -> list[Begun]:
        return [one for one in self._job.meshes() if one.ready]

    def _again(self, name: str) -> None:
        """Starts a process of the config again after a while, as a launcher does."""
        if name in self._job.rollouts:
            self._sleep(self._random.uniform(0, 3))
            self._job.start(name, f"--config.steps={ENDLESS}")

    def _start_all(self, count: int) -> None:
        self._left = self._done()
        self._job.start_all(f"--config.steps={count}")

    def _expect(self, one: Begun, *codes: int) -> None:
        self._expected[one] = self._expected.get(one, set()) | set(codes)

    def _done(self) -> int:
        return len(steps(self._workdir))

    def _wait_for(self, count: int) -> None:
        self._job.wait(lambda: self._done() >= count, STEP, f"step {count} has ended")

    def _whole(self) -> bool:
        return all(one.ready for one in self._job.meshes()) and len(self._job.meshes()) >= WORKERS

    def _aftermath(self, begin: float, count: int) -> tuple[float, float]:
        """(seconds from `begin` until a step had ended, until all meshes were ready), both of which it waits for."""
        whole: list[float] = []

        def over() -> bool:
            if not whole and self._whole():
                whole.append(time.time() - begin)
            return bool(whole) and self._done() >= count

        self._job.wait(over, STEP, f"step {count} has ended and all meshes are ready")
        (line,) = [one for one in lines(self._workdir) if STEP_OF in one and one["step"] == count]
        return line[CLOCK] - begin, whole[0]

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._measure()

    def _measure(self) -> None:
        for name, ones in {
            "the leader": [self._job.leader],
            "a rollout process": self._job.meshes(),
        }.items():
            sizes = [memory(one.process.pid) for one in ones]
            self.memory[name] = max(self.memory[name], *sizes, 0)

    def _check_steps(self) -> None:
        found = steps(self._workdir)
        if found != list(range(1, len(found) + 1)):
            raise Wrong(f"the metrics have these steps: {found}")
