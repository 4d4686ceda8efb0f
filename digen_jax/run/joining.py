"""How a process joins the others of its mesh: as one job of JAX, and where it trains and does not lead.

Every process knows the leader's address from its command line, and finds the others of its job through the leader.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from digen_jax.assemble import recipe_model
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError
from digen_jax.process import team
from digen_jax.process.ending import STOPPED, Stopped, hangs, last_word, leave
from digen_jax.process.launching import MEETING, Place, join_job, reach
from digen_jax.process.ports import free_port
from digen_jax.prompts.dataset import content_hash
from digen_jax.prompts.files import read_bytes
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.following import Following
from digen_jax.remote.identity import Identity, job_token
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.meeting import meet
from digen_jax.remote.sharing import TrainerLink
from digen_jax.remote.wire import Wire
from digen_jax.run.own_mesh import known_nodes
from digen_jax.run.roles import Apart, Trains, own_devices
from digen_jax.scheduling.commands import TRAINER

# Seconds for a mesh's first process to listen; then its address is asked for again.
LISTENING = 20.0
ENDING = 10.0  # seconds between a run's end in two processes of the trainer


def make_wire(recipe: Recipe, apart: Apart) -> Wire:
    """How a process of a run connects to the others, whose config and prompt files must be the same.

    Raises:
      ConfigError: the token is missing.
    """
    files = *recipe.prompts.paths, recipe.evaluation.prompts
    read = {str(path): content_hash(path, read_bytes(path)) for path in files}
    return Wire(Identity.of({"config": recipe.as_json(), "read": read}, job_token()), apart.tls)


def become_one(wire: Wire, apart: Apart) -> None:
    """Makes the processes of a mesh, or of all, one job of JAX, which must not have started; one process needs none.

    Raises:
      ConfigError: the leader refuses this process, or the others do not come.
    """
    name, processes, number = job_of(apart)
    if processes == 1:
        return
    own = f"{apart.host}:{free_port()}" if not number else ""
    hello, until = pb.Hello(mesh=name, process=number), time.monotonic() + MEETING
    while True:
        left = until - time.monotonic()
        host, _, port = meet(wire, apart.place.address, hello, own, left).rpartition(":")
        job = Place(host.strip("[]"), int(port), processes, number, apart.place.devices)
        try:
            if number:
                reach(job.host, job.port, min(left, LISTENING))
            break
        except ConfigError:  # the first process may have been lost, and come again elsewhere
            if time.monotonic() > until - LISTENING:
                raise
    join_own(job, apart)


@contextmanager
def one_job(apart: Apart) -> Iterator[None]:
    """Where this block fails, this process does not wait for the others of a job that all meshes share."""
    try:
        yield
    except BaseException:
        if apart.one_job:
            hangs("JAX's end of the job")
        raise


def job_of(apart: Apart) -> tuple[str, int, int]:
    """(the name of this process's job of JAX, its processes, the number of this one)."""
    role, place = apart.role, apart.place
    if apart.one_job:
        return "the job", place.processes, place.process
    return role.mesh, role.processes, role.process


def join_own(job: Place, apart: Apart) -> None:
    """Joins this process's job of JAX; from then on it works with those of its mesh."""
    join_job(job)
    if apart.one_job:
        team.form(apart.role.offset, apart.role.processes)


@contextmanager
def join_trainer(recipe: Recipe, apart: Apart) -> Iterator[Trains]:
    """Joins the trainer's mesh, whose first process leads; in this block the process ends where that one is lost.

    Raises:
      ConfigError: the leader refuses this process or does not come, or devices that do not suffice.
    """
    wire, role = make_wire(recipe, apart), apart.role
    _, family = recipe_model(recipe)
    become_one(wire, apart)
    within = dict(process=role.process, processes=role.processes, pid=os.getpid())
    following = Following(wire, apart.place.address, pb.Hello(mesh=role.mesh, **within))
    heeds = threading.Thread(target=_heed, args=(following,), name="leader's end", daemon=True)
    heeds.start()
    try:
        link = RemoteLink(wire, known_nodes(recipe, family))
        link.meet(TRAINER, apart.place.address)
        yield Trains(own_devices(role), TrainerLink(link, role.process, role.processes))
    finally:
        # Whoever leaves before the leader says so is lost.
        heeds.join(ENDING)
        following.close("it has ended")


def _heed(following: Following) -> None:
    """Waits until the leader says that the run ends; its commands come within the job of JAX."""
    try:
        for _ in following.commands():
            pass
    except (ConfigError, Stopped) as error:
        leave(last_word(str(error), STOPPED))
