"""What a reward server accepts, and the refusal of more."""

import dataclasses
import math
from typing import Any

from digen_jax.errors import ConfigError, check_range

MIB = 2**20


class Refused(ValueError):
    """A request that is not scored: one sentence for its sender.

    Args:
      status: of the response, 4xx or 503.
      sentence: without anything secret.
      after: seconds after which the sender may try again, None if it should not.
    """

    def __init__(self, status: int, sentence: str, after: float | None = None):
        super().__init__(sentence)
        self.status, self.after = status, after


def _limit(default: int | float, told: str) -> Any:
    """A field of `Limits` with its help on the command line."""
    return dataclasses.field(default=default, metadata={"help": told})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server; those of a request come first."""

    body: int = _limit(128 * MIB, "Bytes of a request.")
    text: int = _limit(4 * MIB, "Bytes of a request's prompts and metadata.")
    values: int = _limit(100_000, "Numbers, texts, lists and dicts in a request's metadata.")
    depth: int = _limit(16, "Depth of lists and dicts in a request's metadata.")
    images: int = _limit(128, "Images or clips of a request.")
    side: int = _limit(4096, "Pixels of an image's height or width.")
    frames: int = _limit(1024, "Frames of a clip.")
    pixels: int = _limit(32 * MIB, "Pixels of all images and frames of a request.")
    upload: float = _limit(30.0, "Seconds in which a request must arrive.")
    score: float = _limit(600.0, "Seconds of one call of the reward, after which it is killed.")
    batch: int = _limit(64, "Images of several requests that are scored in one call.")
    queue: int = _limit(1024, "Images that wait to be scored.")
    memory: int = _limit(1024 * MIB, "Bytes of all requests that are read or wait.")
    connections: int = _limit(512, "Open connections.")
    remembered: float = _limit(
        600.0, "Seconds in which a repeated request gets its first answer again."
    )
    answers: int = _limit(4096, "Answers that are remembered.")

    def check(self) -> None:
        """Raises ConfigError where a number is out of range or a request could never be accepted."""
        for field in dataclasses.fields(self):
            least = 0 if field.name == "remembered" else 1e-3 if field.type is float else 1
            most = 86400 if field.type is float else math.inf
            check_range(f"--{field.name}", getattr(self, field.name), least, most)
        least = max(self.body, 3 * self.pixels)
        if self.memory < least:
            raise ConfigError(
                f"--memory={self.memory} must hold one request: {least} bytes by --body and --pixels"
            )
        if self.queue < self.images:
            raise ConfigError(
                f"--queue={self.queue} must be at least --images={self.images}, a request's"
            )

    def told(self) -> dict[str, Any]:
        """What a sender may want to know."""
        names = ("body", "text", "images", "side", "frames", "pixels", "queue", "upload", "score")
        return {name: getattr(self, name) for name in names}
