"""A process that tells one tracker, wandb or trackio, what a run sends it; `tracking.Tracker` starts it.

It reads a JSON object a line from its standard input: first what `Told` holds, then numbers and pictures. The end of
the input is the end of the run. To its standard output it writes one sentence, if the tracker fails; all that the
tracker itself prints goes to the standard error, which is a file.
"""

import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Told(NamedTuple):
    """What a tracker is started with.

    Attributes:
      kind: a name in `KINDS`.
      workdir: the run's folder, in which the tracker's run is named.
      options: of the tracker's `init`.
      config: of the run.
      seen: the newest step that the run had sent before this start; -1: none.
    """

    kind: str
    workdir: str
    options: dict[str, Any]
    config: Mapping[str, Any] | None
    seen: int


class Wandb:
    """A run of wandb; a run that is continued keeps its id, and wandb ignores the steps that it already has."""

    def __init__(self, told: Told):
        import wandb

        self._picture = wandb.Image
        identity, _ = _identity(told, uuid.uuid4().hex)
        same = dict(dir=told.workdir, id=identity, resume="allow")
        self._run = wandb.init(config=told.config and dict(told.config), **same, **told.options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Tells numbers of a step."""
        self._run.log(values, step=step)

    def picture(self, name: str, path: str, step: int) -> None:
        """Shows a PNG file as it is now."""
        self._run.log({name: self._picture(path)}, step=step)

    def finish(self) -> None:
        """Ends the run; all was sent or written."""
        self._run.finish()


class Trackio:
    """A run of trackio; a run that is continued keeps its name, and the steps that trackio has are not sent again."""

    def __init__(self, told: Told):
        import trackio

        self._trackio, options = trackio, dict(told.options)
        own = (
            options.pop("name", "") or f"{Path(told.workdir).resolve().name}-{uuid.uuid4().hex[:6]}"
        )
        name, again = _identity(told, own)
        self._seen = told.seen if again else -1
        resume = "allow" if again else "never"
        config = told.config and dict(told.config)
        trackio.init(name=name, config=config, resume=resume, embed=False, **options)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Tells numbers of a step."""
        if step > self._seen:
            self._trackio.log(values, step=step)

    def picture(self, name: str, path: str, step: int) -> None:
        """Shows a PNG file as it is now."""
        if step > self._seen:
            self.log({name: self._trackio.Image(path)}, step)

    def finish(self) -> None:
        """Ends the run; all was sent or written."""
        self._trackio.finish()


KINDS: dict[str, Callable[[Told], Wandb | Trackio]] = {"wandb": Wandb, "trackio": Trackio}


def main() -> None:
    """Tells the tracker what comes, to the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        tracker = None
        for line in sys.stdin:
            found = json.loads(line)
            if tracker is None:
                tracker = KINDS[found["kind"]](Told(**found))
            elif "path" in found:
                tracker.picture(**found)
            else:
                tracker.log(**found)
        if tracker is not None:
            tracker.finish()
    except BaseException as error:
        text = str(error).strip() or type(error).__name__
        print(text.splitlines()[0], file=answers, flush=True)
        raise


def _identity(told: Told, new: str) -> tuple[str, bool]:
    """(the name of the tracker's run, whether an earlier start had it), which a file of the workdir keeps."""
    path = Path(told.workdir, f"{told.kind}_id.txt")
    if again := path.exists():
        return path.read_text().strip(), again
    path.write_text(new)
    return new, again
