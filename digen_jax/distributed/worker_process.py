"""A rollout worker's process: samples, decodes and scores what the driver asks for.

The class is plain Python, whatever engine runs it: see `engine.GROUPS` for the threads of its methods.
"""

import gc
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NamedTuple

from digen_jax.config.recipe import Recipe
from digen_jax.distributed.files import check_same
from digen_jax.errors import ConfigError
from digen_jax.process.ending import Stopped
from digen_jax.scheduling.commands import Chunk, Publication

PATIENCE = 60.0  # seconds in which what the driver has sent before a call is executed


class NotDone(RuntimeError):
    """A call failed in a worker that still works; its text has the worker's name and the error."""


class RowsMissing(RuntimeError):
    """A call needs precomputed prompt embeddings; `texts` are their keys in the store."""

    def __init__(self, texts: list[str]):
        super().__init__(texts)
        self.texts = texts


class Opened(NamedTuple):
    """What the driver knows of a worker that is ready: its number of devices, its host, its process there."""

    devices: int
    host: str
    pid: int


class Done(NamedTuple):
    """A call's seconds of work, without compilation, and its parts as (kind, begin, end) in seconds before its end."""

    seconds: float
    parts: tuple[tuple[str, float, float], ...] = ()


class RolloutProcess:
    """A process of a rollout worker.

    Calls that work take `after`, the number of control calls (`drop_chunks`, `drop_weights`, `end_step`) that the
    driver made before: they are executed first, although other threads do it. `serial` names a call in `ping`.

    Args:
      name: the worker's.
      environment: variables to set before JAX is imported.
      folder: the driver's working directory, to which paths in the config are relative.
      path: folders from which modules are imported, in addition to this process's own.
    """

    def __init__(self, name: str, environment: dict[str, str], folder: str, path: list[str]):
        self._name = name
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path]
        self._first, self._pool = True, None  # only the worker's first process scores
        self._alone = True  # the worker has no other process
        self._rows: dict[str, Any] = {}  # precomputed embeddings for the next call, by key
        self._doing: dict[int, Any] = {}  # stopwatches of the calls in progress, by serial
        self._controlled = 0
        self._control = threading.Condition()
        self._lock = threading.Lock()
        self._receiving: set[Publication] = set()
        self._dropped: set[Publication] = set()  # while they were received

    def __repr__(self) -> str:
        """The name before each line of its output."""
        return self._name

    def check_files(self, recipe: Recipe, expected: dict[str, str]) -> None:
        """Checks that this node has the trainer's files: see `files.check_same`. Raises ConfigError."""
        check_same(expected, recipe, "the trainer's")

    def open(self, recipe: Recipe, first: int, place: Any = None) -> Opened:
        """Builds the worker: devices, rewards, model.

        Args:
          recipe: of the run, placed on all its devices.
          first: the present step.
          place: which of the worker's processes this is, a `launching.Place`; None: the only one.

        Raises:
          ConfigError: what the recipe asks for cannot work here.
        """
        from digen_jax.process.launching import join_job, prepare

        rollout = recipe.placement.meshes.rollout
        prepare(rollout.devices // rollout.hosts)
        if place is not None:
            join_job(place)
        import jax

        from digen_jax.engine.hosts import job_devices
        from digen_jax.process import team
        from digen_jax.prompts.files import read_prompt_file
        from digen_jax.run.own_mesh import build_rollout
        from digen_jax.run.scorers import try_scorers

        self._alone = place is None
        self._first = team.is_first()
        self._pool = _rewards(recipe) if self._first else None
        devices = job_devices(rollout.devices, "config.placement.rollout")
        rollout = build_rollout(recipe, devices, self._stored(recipe))
        try_scorers(recipe, rollout.scorers)
        held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
        self._build(recipe, rollout, _batches(recipe, first), first, held_out)
        kind = jax.devices()[0].device_kind
        print(f"ready on {len(devices)} x {kind}", flush=True)
        gc.collect()
        gc.freeze()  # so that later collections take milliseconds
        return Opened(len(devices), socket.gethostname(), os.getpid())

    def _stored(self, recipe: Recipe) -> Any:
        """Precomputed prompt embeddings, which the driver sends on request; None if this worker encodes."""
        from digen_jax.assemble import recipe_model
        from digen_jax.engine.encoding import Rows, Stored
        from digen_jax.prompt_store import encoder_shapes, is_ahead

        _, family = recipe_model(recipe)

        def read(texts: Sequence[str]) -> list[Rows]:
            if missing := [text for text in dict.fromkeys(texts) if text not in self._rows]:
                raise RowsMissing(missing)
            return [self._rows[text] for text in texts]

        ahead = is_ahead(recipe, family)
        return Stored(family, encoder_shapes(recipe, family), read) if ahead else None

    def _build(
        self,
        recipe: Recipe,
        rollout: Any,
        batches: Iterator[list[dict[str, Any]]],
        first: int,
        held_out: list[dict[str, Any]],
    ) -> None:
        """Builds what the calls need.

        Args:
          recipe: of the run.
          rollout: the programs and parameters of this worker, an `engine.system.Rollout`.
          batches: the prompt records of each step from `first` on.
          first: the present step.
          held_out: the prompts of evaluations.
        """
        from digen_jax.distributed.transfer import WorkerLink
        from digen_jax.learned_rewards.on_mesh import named
        from digen_jax.rewards.built_in import on_mesh
        from digen_jax.run.driving import scheduled
        from digen_jax.runtime.evaluation import HeldOut
        from digen_jax.runtime.judging import Judge
        from digen_jax.runtime.sampling import SamplingExecutor
        from digen_jax.runtime.steps import Steps

        settings = scheduled(recipe, held_out)
        shape = settings.images, settings.chunk_images
        self._steps = Steps(batches, *shape, recipe.draws, first, recipe.algorithm.set_steps)
        evaluated = HeldOut(held_out, settings)
        scorers = named(on_mesh(recipe.rewards), rollout.scorers)
        self._link = WorkerLink()
        self._executor = SamplingExecutor(
            self._name, rollout, self._steps, evaluated, self._link, scorers
        )
        weights = recipe.advantages.reward_weights
        self._judge = Judge(self._pool, weights, self._steps, evaluated, settings)

    # ---------------------------------------------------------------------------- work and sync

    def receive(
        self, serial: int, after: int, publication: Publication, structure: Any, *pieces: Any
    ) -> Done:
        """Takes published weights, whose pieces the engine has brought to this node."""
        from digen_jax.distributed.transfer import Packed, unpack

        with self._lock:
            self._receiving.add(publication)
        try:
            with self._works(serial, after) as done:
                self._link.offer(publication, unpack(Packed(structure, list(pieces))))
                self._executor.receive(publication)
        finally:
            self._link.pop(publication)
            with self._lock:
                self._receiving.discard(publication)
                dropped = publication in self._dropped
                self._dropped.discard(publication)
            if dropped:
                self._executor.drop_weights(publication)
        return done()

    def encode(self, serial: int, after: int, step: int) -> tuple[Done, Any]:
        """Encodes a step's prompts; returns their conditioning, packed, for the trainer."""
        from digen_jax.runtime.link import ConditioningOf

        with self._works(serial, after) as done:
            self._executor.encode(step)
            self._rows.clear()
            return done(), self._packed(ConditioningOf(self._name, step))

    def generate(self, serial: int, after: int, chunk: Chunk, publication: Publication) -> Done:
        """Generates a chunk's trajectories, which stay here."""
        with self._works(serial, after) as done:
            self._executor.generate(chunk, publication)
            self._rows.clear()
            return done()

    def decode(self, serial: int, after: int, chunk: Chunk) -> tuple[Done, Any]:
        """Decodes a chunk's images, which stay here; returns its samples, packed, for the trainer.

        The samples are None for images of an evaluation and for a chunk that was dropped.
        """
        from digen_jax.runtime.link import SamplesOf

        with self._works(serial, after) as done:
            self._executor.decode(chunk)
            if not self._first:
                self._executor.scored(chunk)
            return done(), self._packed(SamplesOf(self._name, chunk))

    def score(self, chunk: Chunk) -> Any:
        """Scores a decoded chunk, whose images are freed; returns `Judged`, or None if it was dropped meanwhile.

        The times of exchanges with servers are seconds before the return.
        """
        from digen_jax.rewards.exchanges import moved

        with self._errors():
            try:
                asked = self._executor.score(chunk, self._judge)
            except KeyError:
                if chunk.evaluation or self._steps.find(chunk) is not None:
                    raise
                return None  # another thread dropped it before this call began
            judged = asked.result()
            looks = judged.looks.result()
            self._executor.scored(chunk)
            if not chunk.evaluation and self._steps.find(chunk) is None:
                return None
            ago = moved(judged.exchanges, -time.perf_counter())
            return judged._replace(looks=looks, exchanges=ago)

    # ---------------------------------------------------------------------------------- control

    def add_rows(self, rows: dict[str, Any]) -> None:
        """Takes precomputed embeddings that a call was missing; it is then repeated."""
        with self._controls():
            self._rows |= rows

    def drop_chunks(self, chunks: tuple[Chunk, ...]) -> None:
        """Frees all data of chunks that nobody needs."""
        with self._controls():
            # First of all: a chunk in generation is then not kept.
            self._steps.drop([one for one in chunks if self._steps.find(one) is not None])
            for chunk in chunks:
                self._executor.drop_chunk(chunk)

    def drop_weights(self, publication: Publication) -> None:
        """Frees published weights."""
        with self._controls():
            with self._lock:
                if publication in self._receiving:
                    self._dropped.add(publication)
            self._executor.drop_weights(publication)
            gc.collect()  # JAX's arrays that share the store's memory are in reference cycles

    def end_step(self, step: int) -> None:
        """A step has ended: it and those before it are forgotten."""
        with self._controls():
            self._steps.forget(step + 1)

    def ping(self) -> dict[int, float]:
        """The seconds of work of each call in progress, by its serial."""
        return {serial: one.so_far() for serial, one in list(self._doing.items())}

    def close(self) -> None:
        """Ends the processes of the rewards."""
        if self._pool is not None:
            self._pool.close()

    # ---------------------------------------------------------------------------------- helpers

    @contextmanager
    def _works(self, serial: int, after: int) -> Iterator[Callable[[], Done]]:
        """Times a block, after the control calls before it; yields a function for what was measured so far."""
        from digen_jax.runtime.clock import measured

        with self._control:
            if not self._control.wait_for(lambda: self._controlled >= after, PATIENCE):
                raise NotDone(f"{self._name} did not get all control calls in {PATIENCE:g} s")
        with self._errors(), measured() as stopwatch:
            self._doing[serial] = stopwatch
            try:
                yield lambda: Done(stopwatch.so_far(), stopwatch.parts_ago())
            finally:
                del self._doing[serial]

    @contextmanager
    def _controls(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._control:
                self._controlled += 1
                self._control.notify_all()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Passes errors that mean something to the driver; others become `NotDone`, because they may not be pickled."""
        from digen_jax.engine.divergence import DivergedError
        from digen_jax.process.exhausted import out_of_memory
        from digen_jax.rewards.process import Gone
        from digen_jax.runtime.link import connection_broke

        try:
            yield
        except (ConfigError, Stopped, DivergedError, Gone, NotDone, RowsMissing):
            raise
        except CancelledError:
            raise NotDone(f"{self._name} is closed") from None
        except Exception as error:
            sentence = out_of_memory(error)
            # A collective breaks when another process of the worker is lost: its driver reports that.
            if not sentence and (self._alone or not connection_broke(error)):
                traceback.print_exception(error)
            raise NotDone(f"{self._name}: {sentence or repr(error)}") from None

    def _packed(self, key: Any) -> Any:
        from digen_jax.distributed.transfer import pack

        tree = self._link.pop(key)
        packed = None if tree is None else pack(tree)  # all processes of the worker gather it
        return packed if self._first else None


def _rewards(recipe: Recipe) -> Any:
    """The rewards of this process, which were tried."""
    from digen_jax.rewards.built_in import resolve
    from digen_jax.rewards.canary import check_canaries
    from digen_jax.rewards.pool import RewardPool
    from digen_jax.run.scorers import try_files
    from digen_jax.scheduling.deadlines import Deadline

    found, asked = resolve(recipe.rewards, meshes=True), recipe.reward_pool
    deadline = Deadline(recipe.runtime.deadline)
    pool = RewardPool(found, asked.processes, asked.retries, deadline.seconds)
    try:
        check_canaries(found, pool.score)
        try_files(recipe, pool.score)
    except BaseException:
        pool.close()
        raise
    return pool


def _batches(recipe: Recipe, first: int) -> Iterator[list[dict[str, Any]]]:
    """The prompt records of every step from `first` on."""
    from digen_jax.assemble import drawn_prompts

    # The data set of the prompts; this process needs no workdir.
    with tempfile.TemporaryDirectory(prefix="digen_jax_prompts_") as cache:
        batches = drawn_prompts(recipe, cache)
        step = first
        while True:
            yield batches.at(step)
            step += 1
