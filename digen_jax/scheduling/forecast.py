"""Decides whether a trainer that would wait should generate: plays the rest of the step forward.

The play uses the policy of this package, reduced to the parts that determine the end of the step. When
the trainer has nothing to train, it may generate a fragment or wait; a bounded search tries both. When
its bound is reached, simple rules play the rest.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable

SOON = 1e-12  # seconds: the rewards answer after all other events of the same time
PLAYED = 600  # fragments that a search may play, times decisions: bounds a search's time


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A fragment that is not trained. It can be trained as soon as all fragments of its `gate` are scored."""

    scored_in: float | None  # seconds from now, below 0: it is scored; None: it is queued
    gate: int
    update: int  # its update set; 0: the present one


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The rest of a step at a time when the trainer has nothing to train; all times are in seconds."""

    fragments: tuple[Ahead, ...]  # by index; queued ones are taken in this order
    rollout: tuple[tuple[float, float, float], ...]  # (free in, seconds a fragment, speed)
    sampling: bool  # the trainer's present role
    tags: int  # fragments that the trainer may still generate
    generate: float  # a fragment, by the trainer
    score: float
    train: float
    update: float
    to_sample: float
    to_train: float


def tag_pays(outlook: Outlook) -> bool:
    """Whether the step ends sooner if the trainer generates the next queued fragment now."""
    budget = [max(4, PLAYED // len(outlook.fragments))]
    waits, tags = Play.begin(outlook), Play.begin(outlook)
    tags.tag()
    waits.wait()
    soonest_waiting = _soonest(waits, math.inf, budget[:])
    return _soonest(tags, soonest_waiting, budget) < soonest_waiting * (1 - 1e-9)


def _soonest(play: "Play", best: float, budget: list[int]) -> float:
    """The earliest end of a play over the trainer's choices, or `best` if no end is earlier."""
    if play.bound() >= best:
        return best
    if not play.to_decision():
        return min(best, play.time)
    budget[0] -= 1
    if budget[0] < 0:
        for rule in RULES:
            best = _play_out(play.copy(), rule, best)
        return best
    tagged = play.copy()
    tagged.tag()
    best = _soonest(tagged, best, budget)
    play.wait()
    return _soonest(play, best, budget)


def _play_out(play: "Play", rule: Callable[["Play"], bool], best: float) -> float:
    """The end of a play by a rule, or `best` if that is earlier."""
    while play.to_decision():
        if play.bound() >= best:
            return best
        if rule(play):
            play.tag()
        else:
            play.wait()
    return min(best, play.time)


RULES: tuple[Callable[["Play"], bool], ...] = (
    lambda play: False,
    lambda play: True,
    lambda play: play.time + play.tag_seconds() < play.queue_ends(),
)


@dataclasses.dataclass
class Play:
    """A step that is played. Fragments are numbered by their place in the outlook."""

    outlook: Outlook
    time: float
    sampling: bool
    tags: int
    queue: list[int]  # the next one last
    rollout: list[tuple[float, float, float]]  # heap of (free at, seconds a fragment, speed)
    scored: list[tuple[float, int]]  # heap of (time, fragment) of future scores
    closed: dict[int, int]  # gate -> fragments not scored
    behind: dict[int, list[int]]  # gate -> scored fragments that wait for it
    ready: list[tuple[int, int]]  # heap of (update set, fragment)
    left: list[int]  # fragments to train, of each update set
    uneven: bool  # whether speeds differ
    update: int = 0

    @classmethod
    def begin(cls, outlook: Outlook) -> "Play":
        """A play that starts at the present state."""
        fragments = outlook.fragments
        closed: dict[int, int] = {}
        left = [0] * (1 + max(f.update for f in fragments))
        for fragment in fragments:
            closed[fragment.gate] = closed.get(fragment.gate, 0) + 1
            left[fragment.update] += 1
        scored = [(f.scored_in, i) for i, f in enumerate(fragments) if f.scored_in is not None]
        queue = [i for i, f in enumerate(fragments) if f.scored_in is None][::-1]
        heapq.heapify(scored)
        rollout = list(outlook.rollout)
        heapq.heapify(rollout)
        uneven = len({speed for _, _, speed in rollout}) > 1
        play = cls(
            outlook, 0.0, outlook.sampling, outlook.tags, queue, rollout, scored, closed, {}, [],
            left, uneven,
        )  # fmt: skip
        play._release(-SOON)
        return play

    def copy(self) -> "Play":
        """A copy, to play another choice."""
        return dataclasses.replace(
            self,
            queue=self.queue[:],
            rollout=self.rollout[:],
            scored=self.scored[:],
            closed=dict(self.closed),
            behind={gate: held[:] for gate, held in self.behind.items()},
            ready=self.ready[:],
            left=self.left[:],
        )

    def to_decision(self) -> bool:
        """Plays until the trainer may choose between generating and waiting; False: the step ended."""
        look = self.outlook
        while True:
            self._take_in(self.time)
            if not self.left[self.update]:
                self._become(False)
                self.time += look.update
                self.update += 1
                if self.update == len(self.left):
                    return False
            elif self.ready and self.ready[0][0] == self.update:
                if self.sampling:
                    self._become(False)
                    self._take_in(self.time)
                heapq.heappop(self.ready)
                self.left[self.update] -= 1
                self.time += look.train
            elif self.queue and self.tags:
                return True
            else:
                self.wait()

    def tag(self) -> None:
        """The trainer generates the next queued fragment."""
        fragment = self.queue.pop()
        self._become(True)
        self.time += self.outlook.generate
        self.tags -= 1
        heapq.heappush(self.scored, (self.time + self.outlook.score + SOON, fragment))

    def wait(self) -> None:
        """The trainer waits until the next fragment is scored."""
        self._generate(math.inf)
        self.time = max(self.time, self.scored[0][0])
        self._take_in(self.time)

    def bound(self) -> float:
        """A lower bound of the end of this play."""
        look = self.outlook
        updates = (len(self.left) - self.update) * look.update
        return self.time + sum(self.left[self.update :]) * look.train + updates

    def tag_seconds(self) -> float:
        """Seconds to generate a fragment now."""
        return self.outlook.generate + (0 if self.sampling else self.outlook.to_sample)

    def queue_ends(self) -> float:
        """When the rollout workers would have generated all queued fragments, if work were divisible."""
        rate = sum(1 / seconds for _, seconds, _ in self.rollout)
        begun = sum(max(self.time, free) / seconds for free, seconds, _ in self.rollout)
        return (len(self.queue) + begun) / rate

    def _become(self, sampling: bool) -> None:
        if self.sampling != sampling:
            self.time += self.outlook.to_sample if sampling else self.outlook.to_train
            self.sampling = sampling

    def _generate(self, until: float) -> None:
        """The rollout workers take fragments until some time, or until the next fragment is scored."""
        while self.queue and self.rollout:
            free, seconds, speed = self.rollout[0]
            if free > until or (self.scored and self.scored[0][0] < free):
                return
            if self.uneven:
                faster = [other for other in self.rollout if other[2] > speed and other[0] > free]
                if sum(f + s < free + seconds for f, s, _ in faster) >= len(self.queue):
                    heapq.heapreplace(self.rollout, (min(faster)[0] + SOON, seconds, speed))
                    continue
            end = free + seconds
            heapq.heapreplace(self.rollout, (end, seconds, speed))
            heapq.heappush(self.scored, (end + self.outlook.score, self.queue.pop()))

    def _take_in(self, time: float) -> None:
        """Plays the rollout workers and the rewards up to some time."""
        if self.queue:
            self._generate(time)
        while self.scored and self.scored[0][0] <= time:
            self._release(self.scored[0][0])
            if self.queue:
                self._generate(time)

    def _release(self, time: float) -> None:
        """Fragments scored up to some time become ready if their gate opens."""
        while self.scored and self.scored[0][0] <= time:
            _, number = heapq.heappop(self.scored)
            fragment = self.outlook.fragments[number]
            self.closed[fragment.gate] -= 1
            held = self.behind.setdefault(fragment.gate, [])
            held.append(number)
            if not self.closed[fragment.gate]:
                for i in held:
                    heapq.heappush(self.ready, (self.outlook.fragments[i].update, i))
                held.clear()
