"""Executors whose delays, failures and disconnects are random, and a referee that checks every command.

The referee keeps its own records of the commands and completions. Its checks follow the definitions in the docs; it
shares only the commands with the scheduler.
"""

import dataclasses
import functools
import random
from collections import Counter, defaultdict

from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Completed,
    Decode,
    Deliver,
    DropChunks,
    DropVersion,
    Encode,
    Evaluate,
    Failed,
    Generate,
    Joined,
    Removed,
    Score,
    SyncWeights,
    Train,
    Update,
    WeightsVersion,
)


def values_of(seed, chunk, settings, flat_share):
    """Returns a chunk's values, which depend only on its images; all are equal in some groups."""
    first = chunk.index * settings.chunk_images
    return tuple(
        value_of_image(seed, chunk.step, j, settings, flat_share)
        for j in range(first, first + settings.chunk_images)
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
    """Returns the members by definition, ranked: the first P informative groups by index, then flat ones."""
    if not settings.max_candidates:
        return list(range(settings.groups))
    candidates = range(settings.max_candidates)
    flat = [g for g in candidates if is_flat(seed, step, g, flat_share)]
    informative = [g for g in candidates if g not in flat]
    return (informative + flat)[: settings.groups]


class Referee:
    """Checks every command against the earlier commands and completions."""

    def __init__(self, settings, seed, flat_share):
        self.settings, self.seed, self.flat_share = settings, seed, flat_share
        self.published = {0}  # versions that exist
        self.dropped = set()  # versions of weights
        self.held = defaultdict(set)
        self.encoded = defaultdict(set)
        self.sampling = set()  # workers that have encoded for a chunk that they have not generated
        self.roles, self.first_roles, self.pooled = {}, {}, False
        self.spare, self.failed_roles = {}, defaultdict(set)
        self.group_version = {}
        self.generated, self.decoded = {}, {}  # by which worker
        self.holders = defaultdict(set)  # training workers that have a chunk's samples
        self.handed_on = set()  # chunks whose samples their maker has no longer
        self.scored, self.delivered, self.applied = set(), set(), set()
        self.passes = defaultdict(dict)  # of a chunk of this update: by which worker
        self.training = Counter()  # passes in training
        self.trained, self.evaluated = {}, []
        self.step, self.update = 0, 0
        self.updates = []
        self.serials = set()
        self.open_groups = set()
        self.alive = set()
        self.dropped_chunks = set()
        self.in_a_row = Counter()  # failures of a worker in a role

    def groups_of(self, chunk):
        n, g = self.settings.chunk_images, self.settings.images
        first, last = chunk.index * n // g, ((chunk.index + 1) * n - 1) // g
        return [(chunk.step, group) for group in range(first, last + 1)]

    def chunks_of(self, group):
        n, g = self.settings.chunk_images, self.settings.images
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

    def check_encode(self, c):
        assert "sample" in self.roles[c.worker]
        self.sampling.add(c.worker)

    def check_generate(self, c):
        f = c.chunk
        assert c.weights_version in self.held[c.worker] and c.weights_version not in self.dropped
        assert f.evaluation or f.step in self.encoded[c.worker]
        # A worker finishes the chunk that it has started, even if another worker has the role by then.
        assert "sample" in self.roles[c.worker] or c.worker in self.sampling
        self.sampling.discard(c.worker)
        if f.evaluation:
            assert c.weights_version == WeightsVersion(f.step, self.settings.separate_eval_weights)
            return
        assert not c.weights_version.evaluated
        assert f not in self.decoded, "generated twice"
        version = c.weights_version.version
        for group in self.groups_of(f):
            assert self.group_version.setdefault(group, version) == version
        assert 0 <= f.step - version <= self.settings.max_policy_lag

    def check_decode(self, c):
        assert self.generated[c.chunk] == c.worker

    def check_deliver(self, c):
        f = c.chunk
        assert not f.evaluation and c.to in self.alive and c.to not in self.holders[f]
        own = self.decoded[f] == c.worker and f not in self.handed_on
        assert c.worker in self.holders[f] or own

    def check_score(self, c):
        assert c.chunk in self.decoded and c.chunk not in self.scored

    def check_train(self, c):
        f, s = c.chunk, self.settings
        assert not f.evaluation and f.step == self.step and "train" in self.roles[c.worker]
        assert f in self.scored and c.worker in self.holders[f] and f not in self.dropped_chunks
        assert WeightsVersion(self.step, update=self.update) in self.held[c.worker]
        assert all(self.group_version[group] == c.version for group in self.groups_of(f))
        assert c.update == self.update and c.first >= 0 and c.count > 0
        assert c.first + c.count <= s.passes
        for one in range(c.first, c.first + c.count):
            assert one not in self.passes[f] and not self.training[f, one], "trained twice"
            self.training[f, one] += 1
        self.pooled |= self.trainers > 1
        if s.ordered and not self.pooled:
            ranks = members_of(self.seed, f.step, s, self.flat_share)
            order = dict.fromkeys(i for g in ranks for i in self.chunks_of(g))
            done = sum(one.step == f.step for one in self.trained)
            done += sum(len(one) == s.passes for one in self.passes.values())
            assert f.index == list(order)[done]
        for _, group in self.groups_of(f):
            assert self.update_of(f.step, group) == self.update
        self.check_ready(f, c.early)
        if c.early:
            assert c.count == s.passes
            self.open_groups.update(self.groups_of(f))
            assert len(self.open_groups) <= s.max_incomplete_groups

    @property
    def trainers(self):
        return sum("train" in self.roles[name] for name in self.alive)

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
        return all(Chunk(step, i) in self.scored for i in self.chunks_of(group))

    def check_update(self, c):
        s, size = self.settings, self.settings.groups // self.settings.updates
        assert (c.step, c.update) == (self.step, self.update) and c.worker == TRAINER
        members = members_of(self.seed, c.step, s, self.flat_share)
        expected = {
            i for g in members[c.update * size : (c.update + 1) * size] for i in self.chunks_of(g)
        }
        found = {f.index for f, done in self.passes.items() if len(done) == s.passes}
        assert found == expected, "an update without all of its set"
        assert set(c.trained) == {name for done in self.passes.values() for name in done.values()}
        assert set(c.trained) <= self.alive
        if c.update == s.updates - 1 and s.evaluated_chunks(c.step):
            assert c.step in self.evaluated, "a new version before the last one is evaluated"

    def check_sync(self, c):
        found = c.weights_version
        assert found.version in self.published and found not in self.dropped
        if found.update:
            assert (found.version, found.update) <= (self.step, self.update)
        if c.worker == TRAINER:  # to sample with them
            self.sampling.add(TRAINER)

    def check_evaluate(self, c):
        assert c.version not in self.evaluated
        count = self.settings.evaluated_chunks(c.version)
        done = [f for f in self.scored if f.evaluation and f.step == c.version]
        assert len(done) == count
        self.evaluated.append(c.version)

    def check_drop_version(self, c):
        found = c.weights_version
        assert found not in self.dropped
        self.dropped.add(found)
        if found.evaluated or not self.settings.separate_eval_weights:
            due = self.settings.evaluated_chunks(found.version)
            assert not due or found.version in self.evaluated
        if found.evaluated:
            return
        assert found.version < max(self.published)
        for group, version in self.group_version.items():
            assert version != found.version or self.ended(group), "a chunk refers to the version"

    def check_drop_chunks(self, c):
        for f in c.chunks:
            assert f not in self.passes and f not in self.dropped_chunks
            assert all(
                g not in members_of(self.seed, f.step, self.settings, self.flat_share)
                for _, g in self.groups_of(f)
            )
            self.dropped_chunks.add(f)

    def ended(self, group):
        """Whether a group is completely trained, or does not belong to its step."""
        step, number = group
        if number not in members_of(self.seed, step, self.settings, self.flat_share):
            return True
        chunks = (Chunk(step, i) for i in self.chunks_of(number))
        return all(chunk in self.trained for chunk in chunks)

    def group_trained(self, group):
        chunks = (Chunk(group[0], i) for i in self.chunks_of(group[1]))
        return all(len(self.passes.get(f, ())) == self.settings.passes for f in chunks)

    # ------------------------------------------------------------------------- completions

    def completed(self, c):
        match c:
            case Encode():
                self.encoded[c.worker].add(c.step)
            case Generate():
                self.generated[c.chunk] = c.worker
            case Decode():
                self.decoded[c.chunk] = c.worker
                if "train" in self.roles[c.worker] and not c.chunk.evaluation:
                    self.holders[c.chunk].add(c.worker)
                    self.delivered.add(c.chunk)
            case Deliver():
                if c.worker not in self.holders[c.chunk]:
                    # A worker that only samples keeps no samples that another one has.
                    self.handed_on.add(c.chunk)
                self.holders[c.chunk].add(c.to)
                self.delivered.add(c.chunk)
            case Score():
                self.scored.add(c.chunk)
            case Train():
                for one in range(c.first, c.first + c.count):
                    del self.training[c.chunk, one]
                    self.passes[c.chunk][one] = c.worker
                for group in self.groups_of(c.chunk):
                    if self.group_trained(group):
                        self.open_groups.discard(group)
            case Update():
                self.updates.append((c.step, c.update))
                assert not +self.training
                self.trained |= dict.fromkeys(self.passes, c.update)
                self.passes.clear()
                self.update += 1
                if self.update == self.settings.updates:
                    self.step, self.update = self.step + 1, 0
                    self.published.add(self.step)
                self.held[TRAINER].add(WeightsVersion(self.step, update=self.update))
            case SyncWeights():
                self.held[c.worker].add(c.weights_version)

        self.applied |= self.scored & self.delivered  # what the scheduler knows stays known

    def failed(self, c):
        if isinstance(c, Update):
            self.lose_sums()
        if isinstance(c, Train):
            for one in range(c.first, c.first + c.count):
                del self.training[c.chunk, one]

    def lose_sums(self):
        for f, done in list(self.passes.items()):
            for one in [one for one, name in done.items() if name not in self.alive]:
                del done[one]
            if not done:
                del self.passes[f]
        self.lose_samples()

    def disconnected(self, worker, in_flight, kept):
        self.alive.discard(worker)
        self.held.pop(worker, None)
        self.encoded.pop(worker, None)
        for c in in_flight:
            if isinstance(c, Train) and c.worker == worker:
                self.failed(c)
        if not any(isinstance(c, Update) for c in kept):  # an update may have its sums
            self.lose_sums()
        for f in {*self.decoded, *self.holders}:
            self.holders[f].discard(worker)
            if self.decoded.get(f) == worker:
                self.decoded[f] = None
        self.lose_samples()
        self.note_roles()

    def lose_samples(self):
        for f, maker in list(self.decoded.items()):
            no_images = maker is None and f not in self.scored
            no_samples = not self.holders[f] and (maker is None or f in self.handed_on)
            if f.evaluation:
                if no_images:
                    del self.decoded[f]
            elif f not in self.trained and (no_images or no_samples):
                del self.decoded[f]
                self.handed_on.discard(f)
                self.holders.pop(f, None)
                self.delivered.discard(f)
                if f not in self.applied:
                    self.scored.discard(f)

    def may(self, role, name):
        """Whether a worker has a role, or would have it if no other worker did."""
        own = role in (*self.first_roles[name], *self.spare[name])
        return own and role not in self.failed_roles[name]

    def note_roles(self):
        """Assigns roles; one that no worker may have returns to the workers that lost it, without counted failures."""
        for role in ("sample", "train"):
            if not any(self.may(role, name) for name in self.alive):
                for name in self.alive:
                    self.failed_roles[name].discard(role)
                    self.in_a_row[name, role] = 0
        for name in self.alive:
            self.roles[name] = tuple(
                role for role in self.first_roles[name] if self.may(role, name)
            )
        for role in ("sample", "train"):
            if not any(role in self.roles[name] for name in self.alive):
                for name in self.alive:
                    if self.may(role, name):
                        self.roles[name] += (role,)

    def finish(self):
        """Checks the conditions of a complete run."""
        s = self.settings
        expected = Counter()
        for step in range(s.steps):
            members = members_of(self.seed, step, s, self.flat_share)
            expected.update((step, i) for i in {i for g in members for i in self.chunks_of(g)})
        assert Counter((f.step, f.index) for f in self.trained) == expected
        assert self.updates == [(k, u) for k in range(s.steps) for u in range(s.updates)]
        stale = Counter(
            step for (step, group), version in self.group_version.items() if version < step
        )
        share = s.max_off_policy_fraction * s.groups if s.max_policy_lag else 0
        assert all(count <= share + 1e-6 for count in stale.values())
        due = [v for v in range(s.steps + 1) if s.evaluated_chunks(v)]
        assert sorted(self.evaluated) == due
        dropped = {WeightsVersion(v) for v in range(s.steps - s.max_policy_lag)}
        dropped |= {WeightsVersion(v, True) for v in due if s.separate_eval_weights}
        assert self.dropped == dropped, "a version was never dropped"


BOTH = [("sample", "train"), ("train", "sample")]
ROLES = {"encode": "sample", "generate": "sample", "decode": "sample", "train": "train"}


@dataclasses.dataclass
class World:
    """Completes commands in flight in any order; sometimes a worker disconnects, joins, or fails."""

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
        """Sends an event to the scheduler, and the resulting commands to the referee."""
        commands = self.scheduler.handle(event)
        self.log.append((event, commands))
        for command in commands:
            self.referee.command(command)
            if not isinstance(command, Evaluate | DropVersion | DropChunks):
                self.in_flight[command.serial] = command
        return commands

    def start(self, roles=None):
        """Joins the first workers, the home worker last.

        Args:
          roles: Roles of each other worker. None means `workers` of them, with random roles.
        """
        for one in [None] * self.workers if roles is None else roles:
            self.join(one)
        self.referee.held[TRAINER].add(WeightsVersion(self.referee.step))
        if roles is None and any("sample" in one for one in self.referee.roles.values()):
            return self.add(
                TRAINER, *self.rng.choice([(BOTH[0],), (BOTH[1],), (("train",), ("sample",))])
            )
        return self.add(TRAINER, self.rng.choice(BOTH) if roles is None else BOTH[0])

    def join(self, roles=None):
        """Joins another worker; `roles` of None means random ones."""
        one = self.rng.choice([("sample",), ("sample",), ("train",)])
        drawn = self.rng.choice([one, self.rng.choice(BOTH)])
        if self.referee.settings.early:
            drawn = ("sample",)
        self.born += 1
        self.add(f"worker {self.born}", roles or drawn)

    def add(self, name, roles, spare=()):
        r = self.referee
        r.alive.add(name)
        r.first_roles[name], r.spare[name] = roles, spare
        r.note_roles()
        self.send(Joined(self.now, name, roles, spare))

    def disconnect(self, name):
        r = self.referee
        unscored = {
            f
            for f, maker in r.decoded.items()
            if f not in r.scored
            and (maker == name or (f in r.handed_on and not r.holders[f] - {name}))
        }
        serials = [
            s
            for s, c in self.in_flight.items()
            if name in (getattr(c, "worker", ""), getattr(c, "to", ""))
            or (isinstance(c, Score) and c.chunk in unscored)
        ]
        interrupted = [self.in_flight.pop(serial) for serial in serials]
        self.referee.disconnected(name, interrupted, self.in_flight.values())
        self.send(Removed(self.now, name))
        for command in interrupted:  # late replies of the disconnected worker
            if self.rng.random() < 0.5:
                self.send(Completed(self.now, command, 1.0, (1.0, 2.0)))

    def tick(self):
        """Sends one more event."""
        self.now += self.rng.expovariate(1.0)
        others = sorted(self.referee.alive - {TRAINER})
        if self.rng.random() < self.trouble:
            kind = self.rng.choice(["disconnect", "join"])
            if kind == "disconnect" and others:
                return self.disconnect(self.rng.choice(others))
            if kind == "join" and self.born < 12:
                return self.join()
        assert self.in_flight, "deadlock"
        occupied = Counter(
            c.worker
            for c in self.in_flight.values()
            if not isinstance(c, SyncWeights | Deliver | Score)
        )
        assert all(n == 1 for n in occupied.values())
        serial = self.rng.choice(sorted(self.in_flight))
        command = self.in_flight.pop(serial)
        unlucky = isinstance(command, Update) and not set(command.trained) <= self.referee.alive
        if (unlucky or self.rng.random() < self.trouble) and self.may_fail(command):
            self.referee.failed(command)
            return self.send(Failed(self.now, command, "bad luck"))
        if command.kind in ("decode", "train"):
            self.referee.in_a_row[command.worker, ROLES[command.kind]] = 0
        self.referee.completed(command)
        values = ()
        if isinstance(command, Score):
            r = self.referee
            values = values_of(r.seed, command.chunk, r.settings, r.flat_share)
            if command.chunk.evaluation:
                values = (0.0,)
        return self.send(Completed(self.now, command, self.rng.expovariate(1.0), values))

    def may_fail(self, command):
        """Returns whether the command may fail: each piece of work may fail `retries` times."""
        r = self.referee
        if isinstance(command, Update) and not set(command.trained) <= r.alive:
            return self.rng.random() < 0.5
        match command:
            case Encode():
                return False
            case Generate() | Decode():
                key = "generate", command.chunk
            case SyncWeights():
                key = command.worker, command.weights_version
            case Update():
                key = r.step, r.update
            case _:
                key = command.kind, command.chunk
        role, worker = ROLES.get(command.kind), getattr(command, "worker", "")
        second = role and r.in_a_row[worker, role]
        if second and not any(r.may(role, name) for name in r.alive - {worker}):
            return False
        self.failures[key] += 1
        if self.failures[key] > r.settings.retries:
            return False
        r.in_a_row[worker, role] += 1
        if second:
            r.failed_roles[worker].add(role)
            r.note_roles()
        return True

    def run(self, limit=100_000):
        """Starts the workers unless they have, and continues until the scheduler is finished."""
        if not self.log:
            self.start()
        while not self.scheduler.finished:
            self.tick()
            assert len(self.log) < limit, "no end"
