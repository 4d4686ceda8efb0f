"""A sampling mesh's executor: holds weights by version, prompts by step, fragments in the making."""

import jax

from digen_jax.engine.hosts import fetch, put
from digen_jax.engine.packing import Endpoints, trained_part
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.sampler import Prompts, Weights
from digen_jax.engine.system import Rollout
from digen_jax.flow.sampling import Trajectory
from digen_jax.runtime.steps import Images, Steps
from digen_jax.scheduling.commands import Fragment


class SamplingExecutor:
    """Encodes, generates and decodes on one mesh; every method returns once its work is done."""

    def __init__(self, rollout: Rollout, steps: Steps, trainer: DeviceGroup):
        self.rollout = rollout
        self.weights: dict[int, Weights] = {}
        self.given_up = False
        self._steps, self._trainer = steps, trainer
        self._fixed = Weights(None, rollout.base, rollout.frozen)
        self._prompts: dict[int, Prompts] = {}
        self._begun: dict[Fragment, tuple[int, Trajectory]] = {}  # with their versions

    def encode(self, number: int) -> None:
        """A step's prompts, for this mesh and where nobody was faster for the trainer."""
        step = self._steps[number]
        prompts = jax.block_until_ready(self.rollout.sampler.encode(self._fixed, step.records))
        kept = {old: held for old, held in self._prompts.items() if old >= self._steps.first}
        self._prompts = {**kept, number: prompts}
        if step.prompts is None:
            step.prompts = jax.device_put(prompts, self._trainer.replicated)

    def generate(self, fragment: Fragment, version: int) -> None:
        """A fragment's trajectories by a version that was taken."""
        # In this order: a fragment is dropped before its version is.
        weights, step = self.weights.get(version), self._steps.find(fragment)
        if step is None:
            return
        cut = step.cut(fragment.index)
        trajectory = self.rollout.sampler.generate(
            weights, self._prompts[fragment.step], step.rows[cut], *step.drawn.cut(cut)
        )
        self._begun[fragment] = version, jax.block_until_ready(trajectory)
        if self._steps.find(fragment) is None:
            self.drop_fragment(fragment)

    def decode(self, fragment: Fragment) -> None:
        """A fragment's pictures to the host, what is trained of it to the trainer mesh."""
        begun, step = self._begun.pop(fragment, None), self._steps.find(fragment)
        if step is None:
            return
        version, trajectory = begun
        pictures = self.rollout.sampler.decode(self._fixed, trajectory)
        cut = step.cut(fragment.index)
        keys = put(step.training_keys[cut], self.rollout.group.batch)
        samples = trained_part(trajectory, keys)
        images = Images(version, step.rows[cut], samples, trajectory.sigmas)
        images = jax.block_until_ready(moved(images, self._trainer))
        pictures = fetch(pictures)
        if not self.given_up:  # else another mesh makes the fragment
            self._steps.store(fragment, pictures, images)

    def drop_fragment(self, fragment: Fragment) -> None:
        """Frees a fragment in the making."""
        self._begun.pop(fragment, None)

    def drop_version(self, version: int) -> None:
        """Frees a version's weights."""
        self.weights.pop(version, None)


def moved(images: Images, trainer: DeviceGroup) -> Images:
    """A fragment from a sampling mesh to the trainer mesh, its images split over the devices."""
    samples, whole = images.samples, trainer.replicated
    if isinstance(samples, Endpoints):
        shardings = Endpoints(trainer.batch, trainer.batch, whole)
    else:
        split = trainer.batch_of_steps
        means = None if samples.mean is None else split
        sigma = split if samples.sigma.ndim == 2 else whole
        shardings = type(samples)(split, split, split, sigma, sigma, means)
    return images._replace(
        samples=jax.device_put(samples, shardings),
        sigmas=jax.device_put(images.sigmas, whole),
    )
