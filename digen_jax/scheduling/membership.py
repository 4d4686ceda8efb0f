"""Which candidate groups form a step: the first P with variance, by index and never by arrival."""

import dataclasses

INFORMATIVE, FLAT = "informative", "flat"


@dataclasses.dataclass
class Frontier:
    """The candidates below `limit` are those that can be among the first `wanted` informative ones.

    An informative candidate below `limit` is certainly among them: fewer than `wanted` candidates before
    it are informative or undecided. `limit` never decreases.
    """

    wanted: int
    limit: int = 0
    possible: int = 0  # candidates below the limit that are not flat
    certain: int = 0  # candidates below the limit that are informative

    def note(self, group: int, verdict: str) -> None:
        """Counts a new verdict; the caller calls `advance` next."""
        if group < self.limit:
            self.possible -= verdict == FLAT
            self.certain += verdict == INFORMATIVE

    def advance(self, verdicts: list[str | None]) -> range:
        """Moves the limit as far as possible; returns the groups that it passed."""
        start = self.limit
        while self.possible < self.wanted and self.limit < len(verdicts):
            self.possible += verdicts[self.limit] != FLAT
            self.certain += verdicts[self.limit] == INFORMATIVE
            self.limit += 1
        return range(start, self.limit)


class Candidates:
    """The opened candidate groups of a step and what is known of each.

    `current` bounds the update sets up to the present one, `full` the step. Without dynamic sampling every complete
    group counts as informative.
    """

    def __init__(self, wanted: int, first_set: int, most: int, redundant: int):
        """`most` candidates of which `wanted` form the step. 0 means no dynamic sampling."""
        self.wanted, self.most, self.dynamic = wanted, most or wanted, bool(most)
        self.verdicts: list[str | None] = [None] * (wanted + redundant)
        self.informative = self.decided = 0  # groups
        self.filled: list[int] = []  # groups without variance that fill up the step
        self.current, self.full = Frontier(first_set), Frontier(wanted)
        for frontier in (self.current, self.full):
            frontier.advance(self.verdicts)

    def judge(self, group: int, low: float, high: float) -> range:
        """Judges a complete group by its lowest and highest value; returns the groups that may be members now.

        Opens the candidate that replaces it; if no candidate is left, fills the step up.
        """
        verdict = FLAT if self.dynamic and not low < high else INFORMATIVE
        self.verdicts[group] = verdict
        self.decided += 1
        self.informative += verdict == INFORMATIVE
        for frontier in (self.current, self.full):
            frontier.note(group, verdict)
        if verdict == FLAT and len(self.verdicts) < self.most:
            self.verdicts.append(None)
        self.full.advance(self.verdicts)
        passed = self.current.advance(self.verdicts)
        if self.decided == self.most and self.informative < self.wanted:
            flat = [g for g, verdict in enumerate(self.verdicts) if verdict == FLAT]
            self.filled = flat[: self.wanted - self.informative]
        return passed

    def next_set(self, size: int) -> range:
        """Begins the next update set; returns the groups that may be its members, except filled-up ones."""
        self.current.wanted += size
        return self.current.advance(self.verdicts)

    def is_member(self, group: int) -> bool:
        """Whether a group is certainly in the present update set or one before."""
        if not self.dynamic or self.verdicts[group] == INFORMATIVE:
            return group < self.current.limit
        return group in self.filled_in_set()

    def filled_in_set(self) -> list[int]:
        """The groups without variance that fill up the present update set or an earlier one."""
        return self.filled[: max(0, self.current.wanted - self.informative)]

    @property
    def set_known(self) -> bool:
        """Whether all members of the present update set are known and complete."""
        return bool(self.filled) or self.current.certain == self.current.wanted

    @property
    def step_known(self) -> bool:
        """Whether all members of the step are known and complete."""
        return bool(self.filled) or self.full.certain == self.wanted

    def others(self) -> list[int]:
        """The opened groups that do not form the step, which must be known."""
        members = set(self.filled)
        return [
            g
            for g, verdict in enumerate(self.verdicts)
            if g not in members and not (verdict == INFORMATIVE and g < self.full.limit)
        ]
