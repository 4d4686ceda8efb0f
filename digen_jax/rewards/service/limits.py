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


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server; those of a request come first."""

    body: int = 128 * MIB  # bytes
    text: int = 4 * MIB  # bytes of prompts and metadata
    values: int = 100_000  # numbers, texts, lists and dicts in the metadata
    depth: int = 16  # of lists and dicts in the metadata
    images: int = 128  # images or clips
    side: int = 4096  # pixels of a height or width
    frames: int = 1024  # of a clip
    pixels: int = 32 * MIB  # of all images and frames
    upload: float = 30.0  # seconds in which the body must come
    score: float = 600.0  # seconds of one call of the reward, after which it is killed
    batch: int = 64  # images of requests that are scored in one call
    queue: int = 1024  # images that wait
    memory: int = 1024 * MIB  # bytes of all requests that are read or wait
    connections: int = 512
    remembered: float = 600.0  # seconds in which a repeated request gets its first answer again
    answers: int = 4096  # that are remembered

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
