"""Executors whose delays, failures and losses are drawn at random, and a referee who trusts no one.

The referee keeps its own books of the commands and completions, from the definitions in words; it
shares nothing with the scheduler but the commands.
"""

import dataclasses
import functools
import random
from collections import Counter, defaultdict

from digen_jax.scheduling.commands import (
    TRAINER,
    Checkpoint,
    Decode,
    Deliver,
    DropFragments,
    DropVersion,
    Encode,
    Evaluate,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.events import Completed, Failed, Joined, Lost


def values_of(seed, fragment, settings, flat_share):
    """A fragment's values: a function of its images alone, some groups all equal."""
    first = fragment.index * settings.fragment_images
    return tuple(
        value_of_image(seed, fragment.step, j, settings, flat_share)
        for j in range(first, first + settings.fragment_images)
    )


def value_of_image(seed, step, image, settings, flat_share):
    if is_flat(seed, step, image // settings.images, flat_share):
        return 0.5
    return float(image % settings.images)


@functools.cache
def is_flat(seed, step, group, flat_share):
    return random.Random(f"{seed} {step} {group}").random() < flat_share


@functools.cache
def members_of(seed, step, settings, flat_share):
    """By definition: the first P informative groups by index, then flat ones; in order of rank."""
    if not settings.max_candidates:
        return list(range(settings.groups))
    candidates = range(settings.max_candidates)
    flat = [g for g in candidates if is_flat(seed, step, g, flat_share)]
    informative = [g for g in candidates if g not in flat]
    return (informative + flat)[: settings.groups]


class Referee:
    """Checks every command against what has happened so far."""

    def __init__(self, settings, seed, flat_share):
        self.settings, self.seed, self.flat_share = settings, seed, flat_share
        self.published = {0}  # versions that exist
        self.dropped = set()  # publications
        self.held = defaultdict(set)
        self.encoded = defaultdict(set)
        self.role = "train"
        self.group_version = {}
        self.generated, self.decoded = {}, {}  # by which worker
        self.scored, self.delivered = set(), set()
        self.trained, self.evaluated = {}, []
        self.step, self.update = 0, 0
        self.updates, self.checkpoints = [], []
        self.serials = set()
        self.tagged = Counter()
        self.open_groups = set()
        self.alive = set()
        self.gone = set()  # dropped fragments
        self.was_alone = False  # the trainer without any rollout worker

    def groups_of(self, fragment):
        n, g = self.settings.fragment_images, self.settings.images
        first, last = fragment.index * n // g, ((fragment.index + 1) * n - 1) // g
        return [(fragment.step, group) for group in range(first, last + 1)]

    def fragments_of(self, group):
        n, g = self.settings.fragment_images, self.settings.images
        return range(group * g // n, -(-(group + 1) * g // n))

    def update_of(self, step, group):
        ranks = members_of(self.seed, step, self.settings, self.flat_share)
        return ranks.index(group) // (self.settings.groups // self.settings.updates)

    # ---------------------------------------------------------------------------- commands

    def command(self, c):
        assert c.serial not in self.serials
        self.serials.add(c.serial)
        if (worker := getattr(c, "worker", None)) is not None:
            assert worker in self.alive
        if check := getattr(self, f"check_{c.kind}", None):
            check(c)

    def check_generate(self, c):
        f = c.fragment
        assert c.publication in self.held[c.worker] and c.publication not in self.dropped
        assert f.evaluation or f.step in self.encoded[c.worker]
        if c.worker == TRAINER:
            assert self.role == "sample"
            if self.alive - {TRAINER} and not f.evaluation:
                self.tagged[f.step] += 1
        if f.evaluation:
            assert c.publication == Publication(f.step, self.settings.evaluated_apart)
            return
        assert not c.publication.evaluated
        assert f not in self.decoded, "generated twice"
        for group in self.groups_of(f):
            assert self.group_version.setdefault(group, c.version) == c.version
        assert 0 <= f.step - c.version <= self.settings.staleness

    def check_decode(self, c):
        assert self.generated[c.fragment] == c.worker

    def check_deliver(self, c):
        assert self.decoded[c.fragment] == c.worker and not c.fragment.evaluation
        assert c.fragment not in self.delivered

    def check_score(self, c):
        assert c.fragment in self.decoded and c.fragment not in self.scored

    def check_train(self, c):
        f, s = c.fragment, self.settings
        assert not f.evaluation and f.step == self.step and self.role == "train"
        assert f in self.scored and f in self.delivered
        assert f not in self.trained and f not in self.gone
        assert c.update == self.update
        if s.ordered:
            ranks = members_of(self.seed, f.step, s, self.flat_share)
            order = dict.fromkeys(i for g in ranks for i in self.fragments_of(g))
            assert f.index == list(order)[sum(trained.step == f.step for trained in self.trained)]
        for _, group in self.groups_of(f):
            assert self.update_of(f.step, group) == self.update
        self.check_ready(f, c.early)
        if c.early:
            self.open_groups.update(self.groups_of(f))
            assert len(self.open_groups) <= s.open_groups

    def check_ready(self, f, early):
        s = self.settings
        members = members_of(self.seed, f.step, s, self.flat_share)
        needed = {"group": [g for _, g in self.groups_of(f)], "step": members}[s.readiness]
        if early:
            assert s.early
        else:
            assert all(self.complete(f.step, g) for g in needed)
            assert not (s.early and s.readiness == "step")

    def complete(self, step, group):
        return all(Fragment(step, i) in self.scored for i in self.fragments_of(group))

    def check_update(self, c):
        s, size = self.settings, self.settings.groups // self.settings.updates
        assert (c.step, c.update) == (self.step, self.update) and self.role == "train"
        members = members_of(self.seed, c.step, s, self.flat_share)
        expected = {
            i
            for g in members[c.update * size : (c.update + 1) * size]
            for i in self.fragments_of(g)
        }
        found = {f.index for f, u in self.trained.items() if (f.step, u) == (c.step, c.update)}
        assert found == expected, "an update without all of its set"
        if c.update == s.updates - 1 and s.evaluated_fragments(c.step):
            assert c.step in self.evaluated, "a new version before the last one is evaluated"

    def check_publish(self, c):
        assert c.version in self.published and c.publication not in self.dropped

    def check_switch(self, c):
        assert c.worker == TRAINER and c.role != self.role

    def check_evaluate(self, c):
        assert c.version not in self.evaluated
        count = self.settings.evaluated_fragments(c.version)
        done = [f for f in self.scored if f.evaluation and f.step == c.version]
        assert len(done) == count
        self.evaluated.append(c.version)

    def check_checkpoint(self, c):
        assert c.step == self.step - 1
        self.checkpoints.append(c.step)

    def check_drop_version(self, c):
        found = c.publication
        assert found not in self.dropped
        self.dropped.add(found)
        if found.evaluated or not self.settings.evaluated_apart:
            due = self.settings.evaluated_fragments(found.version)
            assert not due or found.version in self.evaluated
        if found.evaluated:
            return
        assert found.version < max(self.published)
        for group, version in self.group_version.items():
            assert version != found.version or self.ended(group), "a fragment refers to the version"

    def check_drop_fragments(self, c):
        for f in c.fragments:
            assert f not in self.trained and f not in self.gone
            assert all(
                g not in members_of(self.seed, f.step, self.settings, self.flat_share)
                for _, g in self.groups_of(f)
            )
            self.gone.add(f)

    def ended(self, group):
        """Whether a group is completely trained, or does not belong to its step."""
        step, number = group
        if number not in members_of(self.seed, step, self.settings, self.flat_share):
            return True
        fragments = (Fragment(step, i) for i in self.fragments_of(number))
        return all(fragment in self.trained for fragment in fragments)

    # ------------------------------------------------------------------------- completions

    def completed(self, c):
        match c:
            case Encode():
                self.encoded[c.worker].add(c.step)
            case Generate():
                self.generated[c.fragment] = c.worker
            case Decode():
                self.decoded[c.fragment] = c.worker
            case Deliver():
                self.delivered.add(c.fragment)
            case Score():
                self.scored.add(c.fragment)
            case Train():
                assert c.fragment not in self.trained, "trained twice"
                self.trained[c.fragment] = c.update
                for group in self.groups_of(c.fragment):
                    if self.ended(group):
                        self.open_groups.discard(group)
            case Update():
                self.updates.append((c.step, c.update))
                self.update += 1
                if self.update == self.settings.updates:
                    self.step, self.update = self.step + 1, 0
                    self.published.add(self.step)
            case Publish():
                self.held[c.worker].add(c.publication)
            case Switch():
                self.role = c.role

    def lost(self, worker):
        self.alive.discard(worker)
        self.held.pop(worker, None)
        self.encoded.pop(worker, None)
        for f in [f for f, maker in self.decoded.items() if maker == worker]:
            if f not in self.scored or not (f.evaluation or f in self.delivered):
                del self.decoded[f]
                self.scored.discard(f)
                self.delivered.discard(f)

    def finish(self):
        """The conditions that a whole run must fulfil."""
        s = self.settings
        expected = Counter()
        for step in range(s.steps):
            members = members_of(self.seed, step, s, self.flat_share)
            expected.update((step, i) for i in {i for g in members for i in self.fragments_of(g)})
        assert Counter((f.step, f.index) for f in self.trained) == expected
        assert self.updates == [(k, u) for k in range(s.steps) for u in range(s.updates)]
        assert all(count <= s.tag_fragments for count in self.tagged.values()) or self.was_alone
        stale = Counter(
            step for (step, group), version in self.group_version.items() if version < step
        )
        share = s.stale_share * s.groups if s.staleness else 0
        assert all(count <= share + 1e-6 for count in stale.values())
        due = [v for v in range(s.steps + 1) if s.evaluated_fragments(v)]
        assert sorted(self.evaluated) == due
        dropped = {Publication(v) for v in range(s.steps)}
        dropped |= {Publication(v, True) for v in due if s.evaluated_apart}
        assert self.dropped == dropped, "a version was kept for ever"


@dataclasses.dataclass
class World:
    """Completes commands in flight in any order; sometimes a worker is lost, joins, or fails."""

    scheduler: object
    referee: Referee
    rng: random.Random
    trouble: float
    workers: int
    now: float = 0.0
    born: int = 0

    def __post_init__(self):
        self.in_flight, self.failures, self.log = {}, Counter(), []

    def send(self, event):
        """One event to the scheduler, its commands to the referee."""
        commands = self.scheduler.handle(event)
        self.log.append((event, commands))
        for command in commands:
            self.referee.command(command)
            if not isinstance(command, Checkpoint | Evaluate | DropVersion | DropFragments):
                self.in_flight[command.serial] = command
        return commands

    def start(self):
        self.referee.was_alone = not self.workers
        for _ in range(self.workers):
            self.join()
        self.referee.alive.add(TRAINER)
        self.send(Joined(self.now, TRAINER, 1.0))

    def join(self):
        name = f"rollout {self.born}"
        self.born += 1
        self.referee.alive.add(name)
        self.send(Joined(self.now, name, self.rng.choice([0.5, 1.0, 1.0, 3.0])))

    def lose(self, name):
        unscored = {
            f
            for f, maker in self.referee.decoded.items()
            if maker == name and f not in self.referee.scored
        }
        gone = [
            s
            for s, c in self.in_flight.items()
            if getattr(c, "worker", "") == name or (isinstance(c, Score) and c.fragment in unscored)
        ]
        ghosts = [self.in_flight.pop(serial) for serial in gone]
        self.referee.lost(name)
        if len(self.referee.alive) == 1:
            self.referee.was_alone = True
        self.send(Lost(self.now, name))
        for ghost in ghosts:  # late reports of a lost worker
            if self.rng.random() < 0.5:
                self.send(Completed(self.now, ghost, 1.0, (1.0, 2.0)))

    def tick(self):
        """One more event."""
        self.now += self.rng.expovariate(1.0)
        rollout = sorted(self.referee.alive - {TRAINER})
        if self.rng.random() < self.trouble:
            kind = self.rng.choice(["lose", "join"])
            if kind == "lose" and rollout:
                return self.lose(self.rng.choice(rollout))
            if kind == "join" and self.born < 12:
                return self.join()
        assert self.in_flight, "deadlock"
        occupied = Counter(
            getattr(c, "worker", None)
            for c in self.in_flight.values()
            if not isinstance(c, Publish | Deliver) or c.worker == TRAINER
        )
        assert all(n == 1 for name, n in occupied.items() if name is not None)
        serial = self.rng.choice(sorted(self.in_flight))
        command = self.in_flight.pop(serial)
        if self.rng.random() < self.trouble and self.may_fail(command):
            return self.send(Failed(self.now, command, "bad luck"))
        self.referee.completed(command)
        values = ()
        if isinstance(command, Score):
            r = self.referee
            values = values_of(r.seed, command.fragment, r.settings, r.flat_share)
            if command.fragment.evaluation:
                values = (0.0,)
        return self.send(Completed(self.now, command, self.rng.expovariate(1.0), values))

    def may_fail(self, command):
        """Each piece of work may fail `retries` times."""
        r = self.referee
        key = {
            "generate": ("generate", getattr(command, "fragment", None)),
            "decode": ("generate", getattr(command, "fragment", None)),
            "score": ("score", getattr(command, "fragment", None)),
            "deliver": ("deliver", getattr(command, "fragment", None)),
            "train": ("train", getattr(command, "fragment", None)),
            "publish": (
                "publish",
                getattr(command, "worker", 0),
                getattr(command, "publication", 0),
            ),
            "update": ("update", r.step, r.update),
        }.get(command.kind)
        if key is None:
            return False
        self.failures[key] += 1
        return self.failures[key] <= self.referee.settings.retries

    def run(self, limit=100_000):
        self.start()
        while not self.scheduler.finished:
            self.tick()
            assert len(self.log) < limit, "no end"
