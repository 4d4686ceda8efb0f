"""Training: `train` opens a run in its workdir, and `TrainingRun` runs it step by step.

The stages of a step, in order, and the modules that implement them:

  prompts   selects the step's prompts and PRNG keys                 runtime/steps.py
  encode    text encoders                                            parallel/sampler.py
  generate  denoising steps; stores the trained transitions          parallel/sampler.py, diffusion/sampling.py
  decode    latents to images                                        parallel/sampler.py
  score     rewards of the images, advantages within groups          runtime/sampling.py, runtime/steps.py
  train     gradient accumulation over a range of passes             runtime/training.py, parallel/trainer.py
  update    reduces the gradients of all workers; optimizer update   runtime/training.py, parallel/trainer.py
  sync      sends the new weights to the workers                     runtime/array_transfer.py
  evaluate  rewards of held-out prompts, at some steps               runtime/sampling.py

`runtime.executors.Executors.do` calls them. A single worker runs the stages one after the other (colocated training).
With several workers, `scheduling/scheduler.py` assigns work to each, by the same functions (`runtime/driver.py`).
"""

import functools
import json
import pathlib
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import jax

from digen_jax.assemble import held_out_prompts, train_prompts
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import MAY_CHANGE, TrainConfig
from digen_jax.errors import check_metrics
from digen_jax.logging import workdir as workdirs
from digen_jax.logging.metrics import reason_to_stop
from digen_jax.logging.run_log import RunLog, files_table, full_disk
from digen_jax.logging.status import status_updates
from digen_jax.logging.workdir import check_there, switch_profiler
from digen_jax.parallel.mesh import job_devices
from digen_jax.policies import place_here, place_processes
from digen_jax.process import job
from digen_jax.process.job import START_TIMEOUT, Place, join_job
from digen_jax.process.shutdown import Interrupt, mark_hung
from digen_jax.process.terminal import complete_lines
from digen_jax.runtime import checkpointing
from digen_jax.runtime.checkpointing import CheckpointStore, TrainCheckpoint
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.executors import Executors
from digen_jax.runtime.opening import (
    CommandBroadcast,
    TrainerMesh,
    coordinating,
    follow_run,
    open_scheduler,
    open_system,
    restore,
)
from digen_jax.scheduling.commands import TRAINER

if TYPE_CHECKING:  # imported with Ray's workers
    from digen_jax.distributed.launch import TrainerPart
    from digen_jax.distributed.workers import RemoteWorkers, WorkerProxy


def train(
    config: TrainConfig,
    workdir: pathlib.Path,
    part: "TrainerPart | None" = None,
    profiled: Sequence[int] = (),
) -> int | None:
    """Starts or resumes a run in its workdir.

    All trainer processes call this with a shared workdir. Process 0 is the coordinator. `part` has the arguments of
    this process in a trainer with other workers on Ray; None means that the devices of all processes sample and train.
    `profiled` are the steps, counted from 1, of which `jax.profiler` writes a trace.

    Returns:
      None if the run is finished, or the exit code if a signal stopped it.

    Raises:
      ConfigError: A setting does not work here, or the reward returned an invalid value.
      Stopped: A part of the run hangs or failed, such as the reward.
    """
    with complete_lines():
        if part is not None:
            return _train_with_workers(config, workdir, part, profiled)
        if not job.is_first():
            return follow_run(config, workdir)
        with coordinating() as broadcast:
            return _coordinate(_place(config, workdir), workdir, broadcast, profiled)


def _place(config: TrainConfig, workdir: pathlib.Path) -> TrainConfig:
    """Places a run without Ray on the available devices, as configured or as the planner chooses."""
    if config.placement.mode != AUTO:
        return place_here(config)
    from digen_jax.planning.plan import place_run  # only "auto" needs the planner

    return place_run(config, workdir)


def _train_with_workers(
    config: TrainConfig, workdir: pathlib.Path, part: "TrainerPart", profiled: Sequence[int]
) -> int | None:
    """Runs `train` in a process of a trainer with other workers on Ray, which only such runs import."""
    from digen_jax.distributed.engine import RayEngine
    from digen_jax.distributed.transfer import Shares, TrainerTransfer
    from digen_jax.distributed.workers import RemoteWorkers

    config = place_processes(config)
    engine = RayEngine(part.address)
    # Ray's exit handler exits with code 1 if another thread is freeing a stored object.
    mark_hung("Ray")
    hosts, place = config.placement.meshes.trainer.hosts, part.place
    number = place.process if place else 0
    shares = Shares(engine.find(part.mailbox), number, hosts) if hosts > 1 else None
    if number:
        mesh = TrainerMesh(_join(config, place), TrainerTransfer(engine, shares))
        return follow_run(config, workdir, mesh)
    # In a shared JAX job, the workers must start before this process waits for them.
    joint = place if part.one_job else None
    with closing(RemoteWorkers(config, engine, part.devices, shares, joint)) as workers:
        workers.devices = _join(config, place)
        with coordinating() as broadcast:
            return _coordinate(config, workdir, broadcast, profiled, workers)


def _join(config: TrainConfig, place: Place | None) -> list[jax.Device]:
    if place is not None:
        join_job(place)
    return job_devices(config.placement.meshes.trainer.devices, "config.placement.trainer")


def _coordinate(
    config: TrainConfig,
    workdir: pathlib.Path,
    broadcast: CommandBroadcast,
    profiled: Sequence[int],
    workers: "RemoteWorkers | None" = None,
) -> int | None:
    """Runs `train` in the coordinator."""
    check, code = functools.partial(checkpointing.check_steps, workdir, config.steps), None
    with (
        full_disk(workdir),
        workdirs.claim_workdir(workdir, config.as_json(), MAY_CHANGE, check) as changed,
    ):
        finished = workdirs.finished_step(workdir) or 0
        stopped = reason_to_stop(config.stopping, workdir) if finished else None
        if finished < config.steps and not stopped:
            checkpointing.check_records(workdir)
            run = TrainingRun(config, workdir, broadcast, profiled, workers)
            code = run.run(changed)
        else:
            why = f"It has {stopped}" if stopped else "To continue, give a larger config.steps"
            print(f"This run is finished: {finished} steps are done. {why}.")
            print(files_table(workdir))
    broadcast.send("end", (None, code))
    return code


class TrainingRun:
    """Coordinator of a run, from its start or last checkpoint to its results.

    The workdir is claimed by this process. `profiled` are the steps to profile, `workers` those in other processes, if
    any.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: pathlib.Path,
        broadcast: CommandBroadcast,
        profiled: Sequence[int],
        workers: "RemoteWorkers | None" = None,
    ):
        self.config, self.workdir = config, workdir
        self.broadcast, self.workers = broadcast, workers
        self.profiled, self.profiling = profiled, False
        self.checkpoints = CheckpointStore(workdir, config)
        broadcast.send("begin", json.dumps([config.as_json(), workdirs.own_claim()]))
        broadcast.wait_for_answers(START_TIMEOUT)
        if workers is not None:
            # A worker may start before the model is loaded here; it skips the prompts before the checkpoint.
            workers.step = self.checkpoints.oldest() or 0
        devices = None if workers is None else workers.devices
        self.system, self.rewards = open_system(config, self.checkpoints, broadcast, devices)
        self.held_out = held_out_prompts(config)
        self.stopped: str | None = None  # reason to stop early
        self.prompts = train_prompts(config)
        self.log = RunLog(workdir, config, self.held_out, self.checkpoints.release_space)

    def run(self, changed: list[str]) -> int | None:
        """Runs from the last checkpoint to the last step and shows the results; returns like `train`.

        `changed` describes the changes of the config since the last start.
        """
        self.log.describe(self.system)
        with closing(self.rewards):
            with (
                Interrupt() as interrupt,
                closing(self.log),
                checkpointing.finishing(self.checkpoints),
            ):
                checkpoint = self.resume()
                self.log.start(checkpoint.done, changed)
                checkpoint = self.steps(checkpoint, interrupt)
                self.checkpoints.wait()
                if not interrupt.requested:
                    self.log.conclude(checkpoint.done)
            if interrupt.requested:
                print(
                    f"Stopped and saved after step {checkpoint.done}; the same command continues."
                )
                return 128 + interrupt.requested
            if self.stopped:
                print(f"The run has {self.stopped}.")
            self.log.results()
            workdirs.mark_finished(self.workdir, checkpoint.done)
        return None

    def resume(self) -> TrainCheckpoint:
        """Restores the newest checkpoint, or initializes the state."""
        found = restore(self.system, self.checkpoints, self.prompts)
        self.system = self.system._replace(start=None)  # replaced by the state
        self.checkpoints.reserve(found.state)
        self.log.metrics.truncate(found.host.get("metrics", 0))
        return found if found.host else found._replace(host=self.host_state())

    def steps(self, checkpoint: TrainCheckpoint, interrupt: Interrupt) -> TrainCheckpoint:
        """Runs the steps after a checkpoint until the end or a signal; saves and returns the final checkpoint."""
        if self.profiled and checkpoint.done >= self.profiled[-1]:
            print(f"no profile: step {self.profiled[-1]} of --profile is done", flush=True)
        make, workers = functools.partial(self.driver, checkpoint), self.workers
        if workers is None:
            driving: Any = closing(make())
        else:
            workers.step = checkpoint.done
            driving = workers.driving(make, lambda: interrupt.requested)
        places = dict if workers is None else workers.places
        with driving as driver, status_updates(self.workdir, driver.snapshot, places):
            try:
                self.check_disk()
                while checkpoint.done < self.config.steps:
                    if interrupt.requested or self.stopped:
                        break
                    self.profile(checkpoint.done + 1 in self.profiled)
                    checkpoint = self.step(checkpoint, driver)
                    self.check_disk()
                    interrupt.requested = interrupt.requested or self.broadcast.stop_signal()
                    if checkpoint.done < self.config.steps:
                        self.stopped = reason_to_stop(self.config.stopping, self.workdir)
                self.profile(False)
                if not (interrupt.requested or self.stopped):
                    with checkpointing.divergence_reported(
                        checkpoint, self.checkpoints, self.config
                    ):
                        driver.finish()  # the last version's evaluation
            finally:
                # Also saves on failure, unless the failed step has consumed the state in an update.
                if checkpoint.is_intact() and not self.broadcast.is_broken:
                    self.save(checkpoint)
                self.log.timeline(driver.rest(), time.time() - driver.now())
                self.profile(False)
        return checkpoint

    def step(self, checkpoint: TrainCheckpoint, driver: Driver) -> TrainCheckpoint:
        """Runs the step after a checkpoint: trains, logs metrics, and saves a checkpoint if due."""
        done = checkpoint.done + 1
        with checkpointing.divergence_reported(checkpoint, self.checkpoints, self.config):
            with jax.profiler.StepTraceAnnotation("step", step_num=done):
                metrics = driver.step()
            check_metrics(metrics)
        clock = time.time() - driver.now()
        if self.workers is not None:
            self.workers.step = done
        self.log.step(done, metrics, driver.intervals, clock, driver.executor.extremes)
        state, in_flight = driver.executor.state, driver.in_flight
        checkpoint = TrainCheckpoint(done, state, in_flight, self.host_state())
        if self.checkpoints.due(done):
            self.save(checkpoint)
        return checkpoint

    def profile(self, active: bool) -> None:
        """Starts the profiler in all processes of the run, or ends it; no-op if nothing changes."""
        if active == self.profiling:
            return
        self.profiling, folder = active, self.workdir.absolute() / "profile"
        value = str(folder) if active else ""
        self.broadcast.send("profile", value)
        switch_profiler(value, TRAINER)
        if self.workers is not None:
            self.workers.profile(value)
        if not active:
            print(f"wrote a profile to {folder}", flush=True)

    def driver(self, checkpoint: TrainCheckpoint, others: "Sequence[WorkerProxy]" = ()) -> Driver:
        """Builds the driver for the steps after a checkpoint; `others` are workers in other processes."""
        done, in_flight = checkpoint.done, checkpoint.in_flight
        transfer: Any = self.workers and self.workers.transfer
        batches = self.prompts.since(done)
        given = self.config, self.held_out, checkpoint, batches, transfer
        executors = Executors(self.system, *given)
        for worker in others:
            executors.join(worker)
        scheduler = open_scheduler(executors.settings, in_flight, self.config.layout)
        # If all processes sample and train, one may wait long for another one's compilation.
        waits = job.several() and self.workers is None
        deadline = 0 if waits else self.config.runtime.deadline
        logs = self.log.open_command_log(done), self.broadcast, deadline, self.log.evaluated
        return Driver(executors, scheduler, self.rewards, *logs)

    def host_state(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that is on the host: the stream of prompts, the position in the metrics."""
        stream = {"stream": self.prompts.stream}
        return {"prompts": stream, "metrics": self.log.metrics.position()}

    def save(self, checkpoint: TrainCheckpoint) -> None:
        """Saves a checkpoint, unless it exists. Raises Stopped if the workdir was removed."""
        check_there(self.workdir)
        self.checkpoints.wait()
        if (oldest := self.checkpoints.oldest()) is not None:
            self.log.forget(oldest)
        self.broadcast.send("save", (checkpoint.done, tuple(checkpoint.in_flight.kept)))
        with self.broadcast.collective():
            self.checkpoints.store(checkpoint)

    def check_disk(self) -> None:
        """Raises SaveFailed if a write failed or a checkpoint does not fit, and Stopped if the workdir was removed."""
        check_there(self.workdir)
        self.log.check_disk()
        self.checkpoints.check()
