"""One step: the stage of each chunk, the groups that form the step, and the passes left to train.

The step consists of the first P candidate groups with variance, by index and not by arrival.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Sequence

from digen_jax.scheduling.settings import Settings

# Stages of a chunk. A scored chunk waits for its group or set; the passes of a ready chunk may be trained.
QUEUED, SAMPLING, SCORING, SCORED = "queued", "sampling", "scoring", "scored"
READY, TRAINED, DROPPED = "ready", "trained", "dropped"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Passes of a chunk that one worker trains; `early` means before its group or step is complete."""

    index: int  # of the chunk
    first: int
    count: int
    early: bool


@dataclasses.dataclass
class Group:
    """A candidate group; its version is fixed when its first chunk starts."""

    unscored: int
    untrained: int  # chunks
    version: int | None = None
    low: float = math.inf
    high: float = -math.inf
    early: bool = False  # trained before its group, or with readiness "step" its step, was complete


@dataclasses.dataclass
class ChunkState:
    """State of a chunk. A decoded chunk waits for its values and until a training worker has its samples."""

    stage: str = QUEUED
    maker: str = ""  # the worker that sampled it, while that has the samples
    holders: set[str] = dataclasses.field(default_factory=set)  # training workers with its samples
    values: tuple[float, ...] | None = None
    scored: bool = False  # the values are those of its group, too
    scored_at: float = math.inf  # expected
    # (first, count) of passes that are neither trained nor in training
    left: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    trained: int = 0  # passes


class Step:
    """State of a step, initially without started chunks. A group here is a unit of `Settings.unit_images`."""

    def __init__(self, number: int, settings: Settings):
        self.number, self.settings = number, settings
        self.candidates = Candidates(settings)
        self.groups: list[Group] = []
        self.chunks: list[ChunkState] = []
        self.queue: list[int] = []  # heap of queued chunks
        self.queued = self.sampling = 0  # chunks
        self.latest_score = 0.0  # expected; an upper bound over all chunks
        self.ready: list[int] = []  # heap of -index
        self.held: dict[str, list[int]] = {}  # heaps of ready chunks, by holder
        self.turns: dict[tuple[str, str], int] = {}  # ordered: next chunk by role and worker
        self.early: list[int] = []  # heap of scored chunks that may train early
        self.update = 0  # index of the current update set
        self.assigned = 0  # passes of the update set that are trained or in training
        self.trained = 0  # passes of the update set
        self.pieces: dict[str, list[Piece]] = {}  # trained pieces by worker
        self.off_policy = 0  # groups started before the previous step ended
        self.settled = False  # whether candidates outside the step were dropped
        self._open_groups()

    def group_of(self, index: int) -> Group:
        """Returns the group of a chunk."""
        return self.groups[index // self.settings.unit_chunks]

    def chunks_of(self, group: int) -> range:
        """Returns the chunks of a group."""
        size = self.settings.unit_chunks
        return range(group * size, (group + 1) * size)

    # ---------------------------------------------------------------------------- generation

    def next_queued(self, refused: Collection[int] = ()) -> int | None:
        """Returns the first queued chunk that is not `refused`, without removing it from the queue."""
        while self.queue and self.chunks[self.queue[0]].stage != QUEUED:
            heapq.heappop(self.queue)
        if self.queue and self.queue[0] not in refused:
            return self.queue[0]
        left = (i for i in self.queue if i not in refused and self.chunks[i].stage == QUEUED)
        return min(left, default=None)

    def next_own(self, worker: str, place: int, workers: int) -> int | None:
        """Returns the next queued one of a worker's chunks, which are place, place + workers, ..."""
        index = self.turns.get(("sample", worker), place)
        while index < len(self.chunks) and self.chunks[index].stage != QUEUED:
            index += workers
        self.turns["sample", worker] = index
        return index if index < len(self.chunks) else None

    def generate(self, index: int, version: int, scored_at: float) -> bool:
        """Starts a chunk; returns whether it is the first of its group, which fixes the group's version."""
        chunk, group = self.chunks[index], self.group_of(index)
        chunk.stage, chunk.scored_at = SAMPLING, scored_at
        self.latest_score = max(self.latest_score, scored_at)
        self.queued -= 1
        self.sampling += 1
        if group.version is not None:
            return False
        group.version = version
        self.off_policy += version < self.number
        return True

    def requeue(self, index: int) -> None:
        """Requeues a chunk whose samples were lost; it is generated with its group's version."""
        chunk = self.chunks[index]
        if chunk.stage in (QUEUED, TRAINED, DROPPED):
            return
        self.sampling -= chunk.stage == SAMPLING
        self.queued += 1
        chunk.stage, chunk.maker, chunk.holders = QUEUED, "", set()
        if not chunk.scored:
            chunk.values = None
        heapq.heappush(self.queue, index)
        self.turns.clear()

    def decoded(self, index: int, maker: str, scored_at: float) -> None:
        """Marks a chunk as decoded: rewards and a training worker receive it next."""
        chunk = self.chunks[index]
        self.sampling -= 1
        chunk.stage, chunk.maker, chunk.scored_at = SCORING, maker, scored_at
        self.latest_score = max(self.latest_score, scored_at)

    # ------------------------------------------------------------------------------- scoring

    def score(self, index: int) -> None:
        """Marks a decoded chunk as scored if it has values and holders, and chunks that may now be trained as ready."""
        chunk = self.chunks[index]
        if chunk.stage != SCORING or chunk.values is None or not chunk.holders:
            return None
        chunk.stage, again, chunk.scored = SCORED, chunk.scored, True
        number, group = index // self.settings.unit_chunks, self.group_of(index)
        if again:  # generated a second time: its samples and scores are the same as the first time
            return self._offer([number])
        group.unscored -= 1
        group.low = min(group.low, *chunk.values)
        group.high = max(group.high, *chunk.values)
        if group.unscored:
            return self._offer([number])
        was_known = self._members_known
        self.candidates.classify(number, group.low, group.high)
        self._open_groups()
        # Groups that wait for their set, or that fill it up, become ready with its last member.
        known_now = self._members_known and not was_known
        # A group without variance makes room for later ones.
        others_may = known_now or self.candidates.verdicts[number] == FLAT
        return self._offer(range(len(self.groups)) if others_may else [number])

    def drop_others(self) -> tuple[list[int], list[int]]:
        """Drops the candidates outside the step once, when its members are known.

        Returns:
          (started chunks, versions of their groups).
        """
        started, versions = list[int](), list[int]()
        if self.settled or not self.candidates.dynamic or not self.candidates.step_known:
            return started, versions
        self.settled = True
        for number in self.candidates.others():
            for index in self.chunks_of(number):
                chunk = self.chunks[index]
                self.queued -= chunk.stage == QUEUED
                self.sampling -= chunk.stage == SAMPLING
                if chunk.stage != QUEUED:
                    started.append(index)
                chunk.stage = DROPPED
            if (version := self.groups[number].version) is not None:
                versions.append(version)
        return started, versions

    # ------------------------------------------------------------------------------ training

    def take_piece(self, worker: str, count: int) -> Piece | None:
        """Assigns at most `count` passes of a chunk to a worker: a chunk that it holds, or else the last ready one."""
        if not self.ready:
            self._open_early()
        index = self._top(self.held.get(worker, []), 1)
        if index is None:
            index = self._top(self.ready, -1)
        return None if index is None else self._take(index, count)

    def take_in_order(self, worker: str, place: int, workers: int) -> Piece | None:
        """Assigns the next chunk to a worker that trains chunks place, place + workers, ... in this order."""
        index = self.turns.get(("train", worker), place)
        unit, verdicts = self.settings.unit_chunks, self.candidates.verdicts
        while index < len(self.chunks) and (
            verdicts[index // unit] == FLAT or not self.chunks[index].left
        ):
            index += workers
        self.turns["train", worker] = index
        if index >= len(self.chunks):  # groups that fill up the step come last
            filled = (i for g in self.candidates.filled for i in self.chunks_of(g))
            mine = (i for i in filled if i % workers == place and self.chunks[i].left)
            index = next(mine, -1)
        if index < 0 or self.chunks[index].stage != READY:
            return None
        return self._take(index, self.settings.passes)

    def trained_piece(self, worker: str, piece: Piece) -> None:
        """Records that a worker has trained a piece."""
        chunk = self.chunks[piece.index]
        chunk.trained += piece.count
        self.trained += piece.count
        self.pieces.setdefault(worker, []).append(piece)
        if chunk.trained == self.settings.passes:
            self.group_of(piece.index).untrained -= 1

    def return_piece(self, piece: Piece, trained: bool = False) -> None:
        """Makes the passes of a piece available again; `trained` means that it was trained and its sums are lost."""
        chunk = self.chunks[piece.index]
        if trained:
            if chunk.trained == self.settings.passes:
                self.group_of(piece.index).untrained += 1
            chunk.trained -= piece.count
            self.trained -= piece.count
        self.assigned -= piece.count
        chunk.left.append((piece.first, piece.count))
        self.turns.clear()
        if chunk.stage == READY:
            self._push(piece.index)

    def remove_worker(self, worker: str, sums: bool = True) -> list[int]:
        """Removes a worker; returns the chunks whose samples only it had.

        If its gradient `sums` are lost, its passes are trained again.
        """
        for piece in self.pieces.pop(worker, []) if sums else ():
            self.return_piece(piece, trained=True)
        lost = []
        for index, chunk in enumerate(self.chunks):
            chunk.holders.discard(worker)
            if chunk.maker == worker:
                chunk.maker = ""
            needed = chunk.stage in (SCORING, SCORED) or (chunk.stage == READY and chunk.left)
            if needed and not chunk.maker and not chunk.holders:
                lost.append(index)
        return lost

    @property
    def left(self) -> int:
        """Passes of the current update set that are neither trained nor in training."""
        return self.settings.set_passes - self.assigned

    @property
    def set_trained(self) -> bool:
        """Whether the current update set is completely trained."""
        return self.trained == self.settings.set_passes

    def next_set(self) -> bool:
        """Ends the current update set after its update; returns whether it was the last of the step."""
        for piece in (one for pieces in self.pieces.values() for one in pieces):
            self.chunks[piece.index].stage = TRAINED
        self.update += 1
        self.assigned = self.trained = 0
        self.pieces = {}
        if self.update == self.settings.updates:
            return True
        self.candidates.next_set(self.settings.set_units)
        self._offer(range(len(self.groups)))
        return False

    # ------------------------------------------------------------------------------ internal

    @property
    def _members_known(self) -> bool:
        """Whether all members of the current update set, or of the step if it is scored first, are known."""
        found = self.candidates
        return found.step_known if self.settings.step_first else found.set_known

    def _open_groups(self) -> None:
        """Queues the candidates opened since the last call."""
        size, passes = self.settings.unit_chunks, self.settings.passes
        for number in range(len(self.groups), len(self.candidates.verdicts)):
            self.groups.append(Group(unscored=size, untrained=size))
            self.chunks.extend(ChunkState(left=[(0, passes)]) for _ in range(size))
            self.queued += size
            for index in self.chunks_of(number):
                heapq.heappush(self.queue, index)

    def _offer(self, groups: Sequence[int]) -> None:
        """Marks the scored chunks of some groups as ready if readiness allows it."""
        settings, candidates = self.settings, self.candidates
        if settings.step_first and not candidates.step_known:
            return
        for number in groups:
            group = self.groups[number]
            if not candidates.is_member(number):
                continue
            complete = not group.unscored and (settings.readiness == "group" or not settings.early)
            if complete or group.early:
                self._make_ready(number)
            elif settings.early:
                for index in self.chunks_of(number):
                    if self.chunks[index].stage == SCORED:
                        heapq.heappush(self.early, index)

    def _make_ready(self, number: int) -> None:
        for index in self.chunks_of(number):
            if self.chunks[index].stage == SCORED:
                self.chunks[index].stage = READY
                self._push(index)

    def _push(self, index: int) -> None:
        heapq.heappush(self.ready, -index)
        for holder in self.chunks[index].holders:
            heapq.heappush(self.held.setdefault(holder, []), index)

    def _open_early(self) -> None:
        """Opens the first group with a scored, waiting chunk, if another group may be open."""
        most = self.settings.max_incomplete_groups
        while self.early and sum(g.early and g.untrained > 0 for g in self.groups) < most:
            index = heapq.heappop(self.early)
            if self.chunks[index].stage == SCORED:
                self.group_of(index).early = True
                self._make_ready(index // self.settings.unit_chunks)
                return

    def _top(self, heap: list[int], sign: int) -> int | None:
        """Returns the first chunk of a heap that has passes to train."""
        while heap:
            chunk = self.chunks[sign * heap[0]]
            if chunk.stage == READY and chunk.left:
                return sign * heap[0]
            heapq.heappop(heap)
        return None

    def _take(self, index: int, count: int) -> Piece:
        chunk = self.chunks[index]
        early = self.group_of(index).early
        first, there = chunk.left.pop()
        count = there if early else min(count, there)
        if count < there:
            chunk.left.append((first + count, there - count))
        self.assigned += count
        return Piece(index, first, count, early)

    def restore_versions(self, versions: Sequence[int | None], unit_images: int) -> None:
        """Restores the versions of groups from a saved step, whose groups had `unit_images` images each.

        A group gets the oldest version of the saved groups that share an image with it.
        """
        size = self.settings.unit_images
        if unit_images == size:  # the same number of candidates was open
            missing = len(versions) - len(self.candidates.verdicts)
            self.candidates.verdicts.extend([None] * missing)
            self._open_groups()
        for number, group in enumerate(self.groups):
            first, last = number * size, (number + 1) * size - 1
            shared = versions[first // unit_images : last // unit_images + 1]
            group.version = min((v for v in shared if v is not None), default=None)
            self.off_policy += group.version is not None and group.version < self.number


INFORMATIVE, FLAT = "informative", "flat"


@dataclasses.dataclass
class Frontier:
    """Prefix of the candidates, those below `limit`, that can be among the first `wanted` informative ones.

    An informative candidate below `limit` is certainly among them: fewer than `wanted` candidates before
    it are informative or undecided. `limit` never decreases.
    """

    wanted: int
    limit: int = 0
    certain: int = 0  # candidates below the limit that are informative

    def advance(self, verdicts: list[str | None]) -> None:
        """Advances the limit as far as possible."""
        possible = list(itertools.accumulate(verdict != FLAT for verdict in verdicts))
        self.limit = min(len(verdicts), bisect.bisect_left(possible, self.wanted) + 1)
        self.certain = verdicts[: self.limit].count(INFORMATIVE)


class Candidates:
    """Opened candidate groups of a step, and the verdict on each.

    `current` bounds the update sets up to the current one, `full` the step. Without dynamic sampling every complete
    group counts as informative.
    """

    def __init__(self, settings: Settings):
        """Opens the first candidates."""
        self.wanted, self.most = settings.units, settings.max_candidates
        self.dynamic = self.most > 0
        self.verdicts: list[str | None] = [None] * (self.wanted + settings.oversampled_groups)
        self.filled: list[int] = []  # groups without variance that fill up the step
        self.current, self.full = Frontier(settings.set_units), Frontier(self.wanted)
        self._advance()

    def _advance(self) -> None:
        for frontier in (self.current, self.full):
            frontier.advance(self.verdicts)

    def classify(self, group: int, low: float, high: float) -> None:
        """Classifies a complete group by its lowest and highest value.

        Opens the candidate that replaces a group without variance; if none is left, fills up the step.
        """
        if not self.dynamic or low < high:
            self.verdicts[group] = INFORMATIVE
            for frontier in (self.current, self.full):
                frontier.certain += group < frontier.limit
        else:
            self.verdicts[group] = FLAT
            if len(self.verdicts) < self.most:
                self.verdicts.append(None)
            self._advance()
        if self.dynamic and None not in self.verdicts:
            flat = [g for g, verdict in enumerate(self.verdicts) if verdict == FLAT]
            missing = self.wanted - (len(self.verdicts) - len(flat))
            self.filled = flat[: max(0, missing)]

    def next_set(self, size: int) -> None:
        """Starts the next update set."""
        self.current.wanted += size
        self._advance()

    def is_member(self, group: int) -> bool:
        """Returns whether a group is certainly in the current update set or an earlier one."""
        if not self.dynamic or self.verdicts[group] == INFORMATIVE:
            return group < self.current.limit
        informative = self.wanted - len(self.filled)
        return group in self.filled[: max(0, self.current.wanted - informative)]

    @property
    def set_known(self) -> bool:
        """Whether all members of the current update set are known and complete."""
        return bool(self.filled) or self.current.certain == self.current.wanted

    @property
    def step_known(self) -> bool:
        """Whether all members of the step are known and complete."""
        return bool(self.filled) or self.full.certain == self.wanted

    def others(self) -> list[int]:
        """Returns the opened groups outside the step, whose members must be known."""
        members = set(self.filled)
        return [
            g
            for g, verdict in enumerate(self.verdicts)
            if g not in members and not (verdict == INFORMATIVE and g < self.full.limit)
        ]
