"""A family that compiles quickly, and systems around it: for the runtime it is like any other family."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from digen_jax import assemble
from digen_jax.config.checks import check_devices
from digen_jax.config.load import complete, read_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.diffusion.steps import Ode
from digen_jax.models.family import Heads, Size, logical_axes
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.sd3 import network as sd3
from digen_jax.parallel.accumulate import Totals, trained_part
from digen_jax.parallel.mesh import ShardingRules, put
from digen_jax.parallel.placement import Placement, make_placement
from digen_jax.parallel.sampler import fetch_clips
from digen_jax.parallel.system import SampledImages, System, move_to_trainer
from digen_jax.parallel.trainer import TrainState
from digen_jax.rewards import Rewards, alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime import opening, training
from digen_jax.runtime.array_transfer import (
    ArrayTransfer,
    ConditioningKey,
    SamplesKey,
    SyncedWeights,
)
from digen_jax.runtime.checkpointing import InFlight, TrainCheckpoint
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.executors import Executors, follow
from digen_jax.runtime.steps import Steps, StepScores
from digen_jax.runtime.training import TrainingExecutor
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Deliver,
    Score,
    Train,
)
from digen_jax.scheduling.settings import Settings, time_limit
from tests.pipelines import decode_floats

LETTERS, TEXT = 6, 8
MANY = 1_000  # passes: more than any chunk has
AXES = (("outside", ("mlp", "channels")), (".*", (None, "mlp")))


class Conditioning(NamedTuple):
    context: jax.Array
    pooled: jax.Array


class Network(nn.Module):
    """Processes every pixel alone, with dense layers that LoRA can adapt; `places` is never trained."""

    width: int = 8
    dtype: Any = None

    @nn.compact
    def __call__(self, x, sigma, context, pooled):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        text = dense(self.width, name="text")(context.mean(1) + pooled)
        time = dense(self.width, name="time")(jnp.stack([sigma, sigma**2], -1))
        places = self.param("places", nn.initializers.normal(), (*x.shape[1:3], self.width))
        hidden = dense(self.width, name="inside")(x) + places + (text + time)[:, None, None]
        return dense(x.shape[-1], name="outside")(jnp.tanh(hidden)).astype(jnp.float32)


def in_float64(params, x, sigma, prompt, pooled) -> np.ndarray:
    """`Network` for one image, in numpy."""
    p = jax.tree.map(np.float64, params)

    def dense(name, a):
        return a @ p[name]["kernel"] + p[name]["bias"]

    text, time = dense("text", prompt.mean(0) + pooled), dense("time", np.array([sigma, sigma**2]))
    return dense("outside", np.tanh(dense("inside", x) + p["places"] + text + time))


@dataclasses.dataclass(frozen=True)
class ToyFamily:
    """A model family as the rest of the package sees it; parameters are made, not read."""

    network: nn.Module = dataclasses.field(default_factory=Network)
    size: tuple[int, int, int] = (4, 4, 4)
    frozen: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"transformer": ("places",)}
    )
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    encoded_prompts: int = 64
    decoded_pixels: int = 2**22
    guidance: str = "classifier-free"
    heads: ClassVar = Heads(2, 8)
    trained: ClassVar = ("transformer",)
    unused: ClassVar = ()
    optional: ClassVar = ()
    encoders: ClassVar = {"text_encoder": "tokenizer"}
    masked: ClassVar = {}
    decoders: ClassVar = ("vae",)
    edits: ClassVar = False
    pipeline: ClassVar = "ToyPipeline"
    solver: ClassVar = Ode()
    source: ClassVar = None
    sources: ClassVar = 1
    negative_prompt: ClassVar = ""
    lora_targets: ClassVar = "inside|outside"
    lora_loader: ClassVar = "load_lora_weights({})"
    default_steps: ClassVar = 8
    default_guidance: ClassVar = 1.0
    lists: ClassVar = {"transformer": ("transformer_blocks", "to_out", "net")}

    def scheduled(self, steps, size):
        return self

    def in_dtype(self, dtype):
        return dataclasses.replace(self, network=self.network.clone(dtype=dtype))

    def tokenize(self, records):
        prompts = [record["prompt"] for record in records]
        return np.array([[ord(c) % 32 for c in p.ljust(LETTERS)[:LETTERS]] for p in prompts])

    tokenize_null = PipelineFamily.tokenize_null
    expert = PipelineFamily.expert

    def is_truncated(self, prompts):
        return np.array([len(prompt) > LETTERS for prompt in prompts])

    def encode(self, params, ids):
        context = params["text_encoder"]["table"][ids]
        return Conditioning(context, context.sum(1))

    def velocity(self, variables, x, sigma, conditioning, guidance=None):
        return self.network.apply(variables["transformer"], x, sigma, *conditioning)

    def guided(self, null, prompt, guidance):
        return null + guidance * (prompt - null)

    def decode(self, params, latents):
        return jax.nn.sigmoid(latents @ params["vae"]["kernel"])[:, None]

    def encode_images(self, params, images):
        raise ValueError("no encoder")

    def default_size(self):
        return Size(32, 32)

    source_size = PipelineFamily.source_size
    complete = PipelineFamily.complete

    def latent_shape(self, size):
        return self.size

    def sigmas(self, steps, size):
        return make_sigmas(self.scheduler, steps)

    def flops(self, size):
        h, w, c = self.size
        width = self.network.width
        return {"transformer": {"image": 4.0 * h * w * c * width, "text": 2.0 * (TEXT + 2) * width}}

    def shapes(self):
        return jax.eval_shape(self.params)

    def axes(self):
        shapes, table = (
            self.shapes(),
            sd3.AXES if isinstance(self.network, sd3.SD3Transformer) else AXES,
        )
        return {
            part: logical_axes(
                tree, table if part in self.trained else AXES, self.lists.get(part, ())
            )
            for part, tree in shapes.items()
        }

    def read(self, folder, part, shardings=None, dtype=np.float32):
        return self.params()[part]

    def check(self, folder, part):
        pass

    def params(self) -> dict[str, Any]:
        """Numpy arrays of which no number is 0 or 1."""
        x, vector = jnp.zeros((1, *self.size)), jnp.zeros((1, TEXT))
        shapes = jax.eval_shape(
            self.network.init, jax.random.key(0), x, jnp.ones(1), vector[:, None], vector
        )["params"]
        rng = np.random.default_rng(0)
        return {
            "transformer": jax.tree.map(lambda leaf: draw(rng, leaf.shape), shapes),
            "text_encoder": {"table": draw(rng, (32, TEXT))},
            "vae": {"kernel": draw(rng, (self.size[-1], 3))},
        }


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 4
    return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)


def config(**fields) -> ConfigDict:
    """A complete config of a small run; `fields` by dotted names, "__" for the dot, or whole sections."""
    c = dict(
        batch=dict(groups=2, images=4),
        sampler=dict(
            steps=4,
            kind="flow",
            noise_level=0.7,
            window=dict(first=0, length=2),
            guidance=3.0,
            chunk=8,
        ),
        trainer=dict(micro_batch=4),
        evaluation=dict(batch=8),
        # The family is not that of `model.folder`, which need not exist.
        prompts=dict(encoding="each_step"),
    )
    for name, value in fields.items():
        group, _, field = name.partition("__")
        if field:
            c.setdefault(group, {})[field] = value
        else:
            c[group] = value
    return complete(ConfigDict(c))


def meshes(
    rollout: tuple[int, ...],
    trainer: tuple[int, ...],
    workers: int = 1,
    samples: bool = False,
    trainers: int = 1,
) -> dict[str, Any]:
    """The fields of a placement, all parameters split over "fsdp".

    Sizes are (data, fsdp), perhaps with the trainer's time and tensor, and a rollout worker's tensor, behind.
    `samples`: whether the `trainers` training meshes sample, too.
    """
    return dict(
        placement__rollout=dict(
            zip(("data", "fsdp", "tensor"), rollout, strict=False), workers=workers
        ),
        placement__trainer=dict(
            zip(("data", "fsdp", "time", "tensor"), trainer, strict=False),
            samples=samples,
            workers=trainers,
        ),
        placement__rules=((".*", "fsdp"),),
    )


def opened(config: ConfigDict | TrainConfig) -> TrainConfig:
    """The recipe of a config, whose files need not exist."""
    return config if isinstance(config, TrainConfig) else read_config(config)


def system(config: ConfigDict | TrainConfig, devices: int = 8, family: Any = None) -> System:
    """All parts of a run around the toy family, its parameters where the rules put them."""
    family, asked = family or ToyFamily(), opened(config)
    check_devices(asked, devices)
    placement = placed(asked, family, jax.devices()[:devices])
    frozen = family.params()
    trained = {part: frozen.pop(part) for part in family.trained}
    trained = jax.device_put(trained, placement.trainer.params(trained))
    frozen = jax.device_put(frozen, placement.rollout.params(frozen))
    start, base = assemble.split(asked, family, trained, placement.trainer)
    return assemble.connect(asked, placement, family, start, base, frozen)


def placed(config: TrainConfig, family: Any, devices: Sequence[jax.Device]) -> Placement:
    layout = ShardingRules.of(config.placement.rules, family.axes())
    return make_placement(config.placement.meshes, layout, devices)


def replace_model(patch: Callable[..., Any], build: Callable[[TrainConfig], System]) -> None:
    """Makes runs train what `build` returns instead of `config.model.folder`; `patch` is such as `setattr`."""

    def open_parts(config, devices, mesh):
        family = ToyFamily()
        return assemble.Parts(None, family, placed(config, family, devices), None)

    patch(opening, "open_parts", open_parts)
    patch(opening, "load_system", lambda config, _: build(config))


def records(count: int) -> list[dict]:
    prompts = ["red", "a blue", "green!", "four b", "yellow", "x"]
    return [
        {"prompt": prompts[i % 6], "tag": ["one", "two"][i % 2], "serial": 10 + i}
        for i in range(count)
    ]


def brightness(images, prompts, metadata):
    return images.mean((1, 2, 3), dtype=np.float64) / 255


def brightest(images, prompts, metadata):
    """1 for the brightest image of a group, 0 for the others."""
    means = images.mean((1, 2, 3), dtype=np.float64)
    return means == means.max()


brightest.groupwise = True


class Sampled(NamedTuple):
    """A step as a sampling mesh made it: what the trainer was delivered, and the pictures of each chunk."""

    prompts: Any
    images: list[SampledImages]
    pictures: list[np.ndarray]


def sampled_steps(system: System, batches, images: int, size: int, count: int, tuned: Any):
    """The first steps of a run whose chunks have `size` images, all from the same weights."""
    steps = Steps(Settings(count, 1, images, size), batches, system.rng, 0)
    group = system.placement.trainer
    sampler, weights = system.sampler, system.rollout_weights(tuned)
    for step in map(steps.__getitem__, range(count)):
        prompts = sampler.encode(weights, step.records)
        found = Sampled(jax.device_put(prompts, group.replicated), [], [])
        for cut in map(step.slice_of, range(len(step.rows) // size)):
            rows, draws = step.rows[cut], step.draws.subset(cut)
            made = sampler.generate(weights, prompts, rows, *draws)
            samples = trained_part(made, put(step.training_keys[cut], sampler.group.batch))
            chunk = SampledImages(0, rows, samples, made.sigmas)
            found.images.append(move_to_trainer(chunk, group))
            found.pictures.append(fetch_clips(sampler.decode(weights, made)))
        yield found


def rollout(system: System, config: ConfigDict, tuned: Any):
    """(prompts, the images of each chunk) of the step with `records`, from published weights."""
    batch, given = config.batch, iter([records(config.batch.groups)])
    step = sampled_steps(system, given, batch.images, config.sampler.chunk, 1, tuned)
    return next(step)[:2]


def receive(system: System, prompts, images: SampledImages, *known):
    """A chunk in the trainer's form, from any mesh."""
    group = system.placement.trainer
    prompts = jax.device_put(prompts, group.replicated)
    return training.make_train_batch(system, prompts, move_to_trainer(images, group), *known)


def draw_and_show(sampler, weights, prompts, rows, keys, **drawn):
    """(images, trajectory) of a chunk: its clips have one frame."""
    trajectory = sampler.generate(weights, prompts, rows, keys, **drawn)
    return decode_floats(sampler, weights, trajectory)[:, 0], trajectory


def moved(tree: Any, by: float = 0.1) -> Any:
    """Other parameters, where the given ones lie."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: a + jax.device_put(by * draw(rng, a.shape), a.sharding), tree)


def difference(a: Any, b: Any) -> float:
    """Norm of a - b by the norm of b, over whole trees wherever they lie."""
    flat = [
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
        for tree in jax.device_get((a, b))
    ]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def mean(totals: Totals, std: float | None = None) -> Any:
    """The gradient that an update takes; `std` of the rewards where groups were trained before it was known."""
    if totals.unscaled is not None:
        totals = totals.add_policy(totals.unscaled, jnp.float32(1 / (std + 1e-4)))
    return jax.tree.map(lambda g: g / totals.sums["weight"], totals.gradient)


def batches(groups: int):
    """The records of one step after the other, each with serials of its own."""
    for step in itertools.count():
        yield [{**record, "serial": record["serial"] + groups * step} for record in records(groups)]


def fresh(system: System) -> TrainState:
    """A copy of a state, so that a system's own start is not consumed."""
    return system.updater.init(jax.tree.map(lambda leaf: leaf + 0, system.start))


def executors(
    system: System, config: ConfigDict | TrainConfig, state: TrainState, batches, first=0, kept=None
) -> Executors:
    """The executors of a run from the beginning, or from a checkpoint after `first` steps."""
    checkpoint = TrainCheckpoint(first, state, InFlight(kept=kept or {}))
    return Executors(system, opened(config), (), checkpoint, batches)


def replay(executors: Executors, pool: RewardPool, log: list[Command]) -> TrainState:
    """Executes the commands of a recorded log one after the other; returns the state after the last.

    In the order in which the scheduler sent commands, all inputs are available in time, and the trainer gets them
    in the same order as in the run: equal inputs lead to bitwise equal results.
    """
    scored = set()
    for command in log:
        if not isinstance(command, Score):
            follow(executors, command)
        elif command.chunk not in scored:  # else the reward had failed
            scored.add(command.chunk)
            judged = pool.retry(functools.partial(executors.score, command, pool))
            executors.scored(command, judged)
    return executors.state


@contextlib.contextmanager
def driver(
    system: System,
    config: ConfigDict,
    reward=brightness,
    state=None,
    held_out=(),
    first=0,
    in_flight=None,
    transfer=None,
    samplers=(),
    **options,
):
    """A driver from the beginning of a run, which scores in a thread; `options` are its own."""
    asked = opened(config)
    deadline = config.runtime.deadline
    found = reward if isinstance(reward, Rewards) else alone("mine", reward)
    rewards = RewardPool(
        found, 0, config.reward_pool.retries, functools.partial(time_limit, deadline)
    )
    state = fresh(system) if state is None else state
    given = options.pop("batches", None) or batches(asked.max_groups)
    in_flight = in_flight or InFlight()
    checkpoint = TrainCheckpoint(first, state, in_flight)
    with contextlib.closing(rewards):
        executors = Executors(system, asked, held_out, checkpoint, given, transfer)
        for sampler in samplers:
            executors.join(sampler)
        scheduler = opening.open_scheduler(executors.settings, in_flight, asked.layout)
        with contextlib.closing(
            Driver(executors, scheduler, rewards, deadline=deadline, **options)
        ) as found:
            yield found


def drive(system: System, config: ConfigDict, steps: int, reward=brightness, **options):
    """(state, metrics of each step, commands) after some steps from the beginning."""
    log = []
    with driver(system, config, reward, log=log, **options) as found:
        history = [found.step() for _ in range(steps)]
    return found.executor.state, history, log


def trained(system: System, steps: Steps, state: TrainState, scores: StepScores, prompts, part_of):
    """The totals of the first step's chunks, `part_of` some images each, trained by a run's own executor."""
    transfer, made = ArrayTransfer(), "rollout 0"
    transfer.put(ConditioningKey(made, 0), prompts)
    versions = SyncedWeights(transfer, False)
    executor = TrainingExecutor(system, steps, versions, transfer, state)
    step = steps[0]
    for index in range(len(step.rows) // step.size):
        images, chunk = part_of(step.slice_of(index)), Chunk(0, index)
        transfer.put(SamplesKey(made, chunk), (images.samples, images.sigmas))
        executor.deliver(Deliver(0, made, chunk, 0, TRAINER))
        batch = scores.batch(index, system.trainer.algorithm.ranks)
        executor.train(Train(0, TRAINER, chunk, 0, 0, first=0, count=MANY), batch)
    return executor._totals
