"""Opens a run in each of its processes, and the command log by which the coordinator (process 0) drives the others.

The coordinator calls `open_system`. Before each piece of collective work it appends an entry to the log, in
jax.distributed's key-value store. The other processes (`follow_run`) execute the entries in order, so that all
processes enqueue the same work in the same order. Only the coordinator writes to the workdir's records.
"""

import itertools
import json
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax._src import distributed  # JAX has no public API for its key-value store

from digen_jax.assemble import (
    held_out_prompts,
    load_system,
    open_parts,
    read_scorers,
    train_prompts,
)
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_checks import report_odd_prompts
from digen_jax.data.prompt_files import PromptBatches
from digen_jax.errors import ConfigError
from digen_jax.logging.workdir import check_shared, switch_profiler
from digen_jax.models.family import Family
from digen_jax.models.text.tokenizers import known_words
from digen_jax.parallel.placement import MeshRole
from digen_jax.parallel.system import System
from digen_jax.policies import is_precomputed, place_here, start_warnings
from digen_jax.process import job, shutdown
from digen_jax.process.shutdown import STOPPED, Interrupt, Stopped, out_of_memory
from digen_jax.rewards import Scores
from digen_jax.runtime.array_transfer import (
    DISCONNECT_TIMEOUT,
    ArrayTransfer,
    TransferError,
    is_connection_error,
    may_be_disconnect,
)
from digen_jax.runtime.checkpointing import CheckpointStore, InFlight, TrainCheckpoint
from digen_jax.runtime.executors import Executors, follow
from digen_jax.runtime.sampling import open_rewards, try_scorers
from digen_jax.runtime.steps import ScoredChunk
from digen_jax.scheduling.commands import TRAINER, WeightsVersion, pack, unpack
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import GUESSED, Settings

LOG, STOP, ANSWER = "digen_jax/log", "digen_jax/stop", "digen_jax/answer"
WAIT = 1000  # milliseconds between two checks for signals


class CommandBroadcast:
    """Writes the coordinator's command log; no-op with a single process. Thread-safe."""

    def __init__(self):
        self._client = distributed.global_state.client if job.several() else None
        self.is_broken = False  # whether this process failed during collective work
        self._lock = threading.Lock()
        self._written, self._step, self._forgotten = 0, 0, 0

    def send(self, kind: str, value: Any = None) -> None:
        """Appends an entry; `value` is anything that `pack` accepts."""
        if self._client is None:
            return
        text = json.dumps([kind, pack(value)])
        with self._lock:
            self._client.key_value_set(f"{LOG}/{self._written}", text)
            self._written += 1

    def wait_for_answers(self, seconds: float) -> None:
        """Waits until all other processes have called `answer`.

        Raises:
          ConfigError: A process reported an error.
          Stopped: A process did not answer in time.
        """
        if self._client is None:
            return
        limit = int(min(seconds, job.LONGEST_WAIT) * 1000)
        for number in (job.members() or range(job.size()))[1:]:
            try:
                found = self._client.blocking_key_value_get(f"{ANSWER}/{number}", limit)
            except jax.errors.JaxRuntimeError as error:
                raise Stopped(
                    f"process {number} has not opened the run within {seconds:g} seconds: check its log, and start the "
                    "same command on all again"
                ) from error
            if found:
                raise ConfigError(found)

    @contextmanager
    def stage(self, kind: str) -> Iterator[None]:
        """Runs a stage of opening the run. The other processes run it, too, and wait until it has ended here."""
        yield
        self.send(kind)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Marks collective work. If it fails here, the other processes may hang in it."""
        try:
            yield
        except BaseException:
            self.is_broken = self._client is not None
            raise

    def step_done(self) -> None:
        """Deletes the entries of the step before the last one; all processes have executed them."""
        if self._client is None:
            return
        with self._lock:
            for number in range(self._forgotten, self._step):
                self._client.key_value_delete(f"{LOG}/{number}")
            self._forgotten, self._step = self._step, self._written

    def stop_signal(self) -> int:
        """Returns the number of a signal that another process received, or 0."""
        found = self._client and self._client.key_value_dir_get(STOP)
        return int(found[0][1]) if found else 0


def answer(error: str) -> None:
    """Reports once to the coordinator whether this process can start: an error message, or "" for success."""
    state: Any = distributed.global_state
    state.client.key_value_set(f"{ANSWER}/{state.process_id}", error)


def received_entries(interrupt: Interrupt) -> Iterator[tuple[str, Any]]:
    """Yields log entries (kind, value) in order; forwards a signal of this process to the coordinator."""
    state, passed_on = cast(Any, distributed.global_state), False
    for number in itertools.count():
        text = None
        while text is None:
            try:
                text = state.client.blocking_key_value_get(f"{LOG}/{number}", WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if interrupt.requested and not passed_on:
                state.client.key_value_set(
                    f"{STOP}/{state.process_id}", str(int(interrupt.requested))
                )
                passed_on = True
        kind, value = json.loads(text)
        yield kind, unpack(value)


class RunEnded(Exception):
    """Raised when the coordinator ended the run; args: (error message or None, exit code or None)."""


class FollowedLog:
    """The command log in the other processes; `received` yields its entries."""

    def __init__(self, received: Iterator[tuple[str, Any]]):
        self._received = received

    def entry(self) -> tuple[str, Any]:
        """Returns the next entry. Raises RunEnded."""
        kind, value = next(self._received)
        if kind == "end":
            raise RunEnded(*value)
        return kind, value

    @contextmanager
    def stage(self, kind: str) -> Iterator[None]:
        """Runs a stage of opening the run, and waits until the coordinator has completed it.

        Most errors occur in all processes; the coordinator reports them.
        """
        try:
            yield
        except ConfigError:
            self.entry()
            raise
        self.entry()

    def collective(self) -> AbstractContextManager:
        """No-op: any error in this process ends it."""
        return nullcontext()


@contextmanager
def coordinating() -> Iterator[CommandBroadcast]:
    """Yields the coordinator's broadcast. If the block fails outside collective work, the others get its error."""
    broadcast = CommandBroadcast()
    try:
        yield broadcast
    except BaseException as error:
        if broadcast.is_broken:
            exit_failed(error)
        known = isinstance(error, ConfigError | Stopped)
        text = str(error) if known else f"the first process: {out_of_memory(error) or repr(error)}"
        broadcast.send("end", (text, STOPPED if isinstance(error, Stopped) else None))
        raise


def exit_failed(error: BaseException) -> None:
    """Ends a failed process without waiting for the others: they may be blocked in collective work and then fail, too.

    The exit code is that of `run_main` for the same error.
    """
    message, code = "".join(traceback.format_exception(error)).rstrip(), 1
    if memory := out_of_memory(error):
        message, code = memory, 2
    elif isinstance(error, ConfigError | Stopped):
        message, code = str(error), 2 if isinstance(error, ConfigError) else STOPPED
    elif may_be_disconnect(error):
        # The thread that detects the disconnect logs it and exits.
        time.sleep(DISCONNECT_TIMEOUT)
        code = STOPPED
        if is_connection_error(error):
            message = f"another process disconnected ({str(error).partition(chr(10))[0]})"
        elif isinstance(error, TransferError):
            message = str(error)
    number = distributed.global_state.process_id
    ends = f"process {number} has failed, which ends the run: the same command continues from the last checkpoint"
    shutdown.exit_now(shutdown.log_fatal(f"{message}\n{ends}", code))


def open_system(
    config: TrainConfig,
    checkpoints: CheckpointStore,
    log: CommandBroadcast | FollowedLog,
    trainer: Sequence[jax.Device] | None = None,
) -> tuple[System, Any]:
    """Tests the rewards, encodes prompts if they are precomputed and images if files train, and loads the model.

    All processes of the trainer call it. `trainer` are its devices if other workers sample; None means that all devices
    sample and train.

    Returns:
      The system, and in the coordinator the reward pool, which the caller closes.

    Raises:
      ConfigError: A reward, a prompt file or the model is invalid.
    """
    mesh: MeshRole | None = None if trainer is None else "trainer"
    devices = jax.devices() if trainer is None else trainer
    first, rewards = isinstance(log, CommandBroadcast), None
    with ExitStack() as failing:  # closes the reward processes, also after Ctrl-C
        with log.stage("try"):
            encodings, done = [], checkpoints.oldest() or 0
            parts = open_parts(config, devices, mesh)
            if is_precomputed(config, parts.family):
                from digen_jax.precompute import find_missing, reached  # few runs need it

                encodings.append(find_missing(config, parts, reached(config, done)))
            if config.algorithm.given_images:
                from digen_jax.precompute import find_missing_latents  # few runs need it

                encodings.append(find_missing_latents(config, parts))
            scorers = () if mesh else read_scorers(config, parts.placement.rollout)
            if first:
                rewards = open_rewards(config)
                failing.callback(rewards.close)
        with log.stage("encode"):
            try_scorers(config, scorers)
            if first:
                print_warnings(config, parts.family)
        for encoding in encodings:
            with log.collective():
                encoding.run()
        with log.stage("built"):
            system = load_system(config, parts)
            if mesh is None:
                system = system.with_scorers(scorers)
        failing.pop_all()
    return system, rewards


def print_warnings(config: TrainConfig, family: Family) -> None:
    """Prints warnings about the config and about prompt files, such as truncated prompts."""
    for warning in start_warnings(config, family):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    paths = (*config.prompts.paths, config.evaluation.prompts)
    report_odd_prompts(paths, family.is_truncated, known_words(family))


def open_scheduler(settings: Settings, in_flight: InFlight, layout: str) -> Scheduler:
    """Creates the scheduler of a run or, if work was `in_flight` at the newest checkpoint, restores it.

    Costs that were measured in another layout than `layout`, the `config.layout` of this process, are discarded.

    Raises:
      ConfigError: The checkpoint is from an older version of digen_jax.
    """
    if in_flight.scheduler is None:
        return Scheduler(settings, GUESSED)
    try:
        costs = None if in_flight.layout == layout else GUESSED
        return Scheduler(settings, costs, in_flight.scheduler)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "the newest checkpoint is of an older version of digen_jax, whose scheduler had another state: "
            "continue with that version, or start in a new --workdir"
        ) from error


class TrainerMesh(NamedTuple):
    """Devices of the trainer, and its transfer to workers in other processes."""

    devices: Sequence[jax.Device]
    transfer: ArrayTransfer


def follow_run(
    config: TrainConfig, workdir: pathlib.Path, mesh: TrainerMesh | None = None
) -> int | None:
    """Executes the coordinator's command log until the run ends; returns and raises like `train.train`.

    `mesh` is the trainer's mesh if other workers sample. None means that all devices sample and train.
    """
    jax.devices()  # the other processes block in this call until this one joins
    with Interrupt() as interrupt:
        try:
            _follow(config, workdir, FollowedLog(received_entries(interrupt)), mesh)
        except RunEnded as end:
            error, code = end.args
        except BaseException as failure:
            exit_failed(failure)
    if error is not None:
        raise Stopped(error) if code == STOPPED else ConfigError(error)
    return code


def _follow(
    config: TrainConfig, workdir: pathlib.Path, log: FollowedLog, mesh: TrainerMesh | None
) -> None:
    """Executes the log until `RunEnded` is raised."""
    _, value = log.entry()
    try:
        first, claim = json.loads(value)
        config = config if mesh else place_here(config)
        check_shared(workdir, claim)
        if config.as_json() != first:
            raise ConfigError(
                "the config of this process differs from the first one's: start all processes with the same command"
            )
    except ConfigError as error:
        answer(str(error))
        log.entry()
        raise
    answer("")
    checkpoints = CheckpointStore(workdir, config)
    system, _ = open_system(config, checkpoints, log, mesh and mesh.devices)
    prompts = train_prompts(config)
    checkpoint = restore(system, checkpoints, prompts)
    given = held_out_prompts(config), checkpoint, prompts.since(checkpoint.done)
    executors = Executors(system, config, *given, mesh and mesh.transfer)
    with closing(checkpoints):
        while True:
            _execute(executors, checkpoints, *log.entry())


def restore(
    system: System, checkpoints: CheckpointStore, prompts: PromptBatches
) -> TrainCheckpoint:
    """Restores the newest checkpoint, or initializes the state, which consumes `system.start`."""
    found = checkpoints.newest(system.updater.init(system.start))
    if found.host:
        prompts.check(found.host["prompts"]["stream"])
    return found


def _execute(executors: Executors, checkpoints: CheckpointStore, kind: str, value: Any) -> None:
    """Executes one entry of the log."""
    match kind:
        case "do":
            follow(executors, value)
        case "delivered":
            executors.steps.ensure(value.chunk.step)
            executors.do(value)
        case "scored":
            command, columns, kl = value
            if not command.chunk.evaluation:
                executors.steps.ensure(command.chunk.step)
            # Scores without a weight are not sent.
            scores = Scores(np.asarray(columns, np.float32), {})
            kl = None if kl is None else np.asarray(kl, np.float32)
            executors.scored(command, ScoredChunk(scores, kl=kl))
        case "save":
            done, versions = value
            in_flight = InFlight({}, {v: executors.versions[WeightsVersion(v)] for v in versions})
            checkpoints.store(TrainCheckpoint(done, executors.state, in_flight))
        case "profile":
            switch_profiler(value, TRAINER)
        case _:
            raise ValueError(f"the first process sent {kind!r}: it runs another version")
