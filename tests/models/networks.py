"""A transformer beside diffusers' in torch, with random parameters: the table that `test_networks.py` reads."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from digen_jax.models.family import Component
from tests.models import parity

Arrays = dict[str, Any]  # by the name of the network's argument


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny network and its inputs, at least two unlike examples of sides that differ.

    Attributes:
      fields: of diffusers' config.
      shapes: of the inputs that have gradients: latents, context and so on.
      numbers: the other inputs.
      remat: of the backward pass.
      blocks: suffixes of the parameters' runs of blocks, such as "0to1" of transformer_blocks_0to1, sorted by name.
      slow: whether it is for the slow tests alone.
    """

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    numbers: Arrays
    remat: str
    blocks: str
    slow: bool = False


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of a forward pass.

    Attributes:
      given: of `flops`: a config, the shape of the latents, tokens of the text, and what a family has besides.
      inputs: for the compiler to count: shapes of the network's inputs besides latents and sigma.
      compiled: the config that is compiled. None means the given one.
      by_hand: operations by stream, where they are counted by hand.
    """

    given: tuple[Any, ...]
    inputs: Arrays = dataclasses.field(default_factory=dict)
    compiled: Any = None
    by_hand: dict[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Network:
    """A transformer of a family.

    Attributes:
      component: ours.
      config: of ours, a class.
      torch_class: diffusers'.
      call: diffusers' velocity, channels last, from our inputs as tensors, as its pipeline calls the network.
      cases: the first is used where one is enough.
      sizes: of a config, the sizes of dimensions by their logical axis.
      minimal: fields of a small network whose others have diffusers' defaults.
      refused: fields that are not supported; the error names the first.
      lora_targets: the family's.
      targets: ends of the layers' names that a published LoRA adapts, and the number of such layers.
      flops: what the compiler counts, and what is counted by hand.
      prepare: redraws of a torch network what `parity.randomise` leaves.
      time: path of diffusers' time features in a network that is compared in float64. "" means float32.
      exact: noise levels or times of two examples that diffusers does not round in bfloat16.
    """

    component: Component
    config: Any
    torch_class: Any
    call: Callable[..., torch.Tensor]
    cases: Mapping[str, Case]
    sizes: Callable[[Any], dict[str | None, set[int]]]
    minimal: dict[str, Any]
    refused: list[dict[str, Any]]
    lora_targets: str
    targets: tuple[list[str], int]
    flops: list["Flops"]
    prepare: Callable[[torch.nn.Module], None] = lambda module: None
    time: str = ""
    exact: Arrays = dataclasses.field(default_factory=lambda: {"sigma": np.float32([0.25, 0.5])})

    @property
    def first(self) -> str:
        """The name of the first case."""
        return next(iter(self.cases))

    @functools.cached_property
    def abstract(self) -> Callable[[Any], Any]:
        """By config: the shapes of the parameters."""

        @functools.cache
        def trace(config: Any):
            network, inputs = self.component.network(config), self.component.inputs(config)
            return jax.eval_shape(lambda: network.init(jax.random.key(0), *inputs))["params"]

        return trace

    def to_flax(self, state: dict[str, torch.Tensor], config: Any) -> Any:
        """A state_dict as our parameters."""
        return parity.to_flax(state, self.abstract(config), self.component.lists)

    @functools.cached_property
    def models(self) -> Callable[[str], tuple[torch.nn.Module, Any, Any]]:
        """By case: a torch network with every tensor redrawn, our config, and our parameters."""

        @functools.cache
        def make(case: str):
            module = parity.randomise(self.torch_class(**self.cases[case].fields))
            with torch.no_grad():
                self.prepare(module)
            config = self.config.from_config(dict(module.config))
            return module, config, self.to_flax(module.state_dict(), config)

        return make

    def inputs(self, case: str) -> tuple[Arrays, Arrays]:
        """The inputs that have gradients, and the others."""
        draw = np.random.default_rng(0).standard_normal
        drawn = {name: draw(shape) for name, shape in self.cases[case].shapes.items()}
        return {name: np.float32(array) for name, array in drawn.items()}, self.cases[case].numbers

    def velocity(self, case: str, params: Any, inputs: Arrays, numbers: Arrays, **options: Any):
        """Ours."""
        network = self.component.network(self.models(case)[1], **options)
        return network.apply({"params": params}, **inputs, **numbers)

    @functools.cached_property
    def found(self) -> Callable[[str], tuple[Any, Any, Any]]:
        """By case: our velocity, and the gradients of its product with `direction`: of parameters and of inputs."""

        @functools.cache
        def compute(case: str):
            inputs, numbers = self.inputs(case)
            numbers = {k: jnp.asarray(v) if np.ndim(v) else v for k, v in numbers.items()}

            def objective(params, inputs):
                remat = self.cases[case].remat
                v = self.velocity(case, params, inputs, numbers, remat=remat)
                return jnp.sum(v * direction(v.shape)), v

            with jax.default_matmul_precision("highest"):
                program = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
                (_, v), gradients = program(self.models(case)[2], inputs)
            return v, *gradients

        return compute

    def expected(self, case: str, **changed: Any) -> tuple[np.ndarray, Any, Arrays]:
        """The same from diffusers; with other numbers if given."""
        module, config, _ = self.models(case)
        inputs, numbers = self.inputs(case)
        dtype = np.float64 if self.time else np.float32
        module = copy.deepcopy(module).to(torch.float64 if self.time else torch.float32)
        if self.time:  # so that the errors are ours alone
            module.get_submodule(self.time).forward = parity.time_features
        leaves = {
            name: torch.tensor(array.astype(dtype), requires_grad=True)
            for name, array in inputs.items()
        }
        v = self.call(module, **leaves, **tensors(numbers | changed))
        (v * torch.tensor(direction(v.shape))).sum().backward()
        gradients = self.to_flax(parity.gradients(module), config)
        return v.detach().numpy(), gradients, {k: leaf.grad.numpy() for k, leaf in leaves.items()}


def tensors(arrays: Arrays) -> Arrays:
    """Arrays as tensors; whole numbers stay."""
    return {k: torch.tensor(np.asarray(v)) if np.ndim(v) else v for k, v in arrays.items()}


def direction(shape: tuple[int, ...]) -> np.ndarray:
    """What a velocity is multiplied by to have one gradient."""
    return np.random.default_rng(1).standard_normal(tuple(shape)).astype(np.float32)


def padded(lengths: tuple[int, ...]) -> np.ndarray:
    """The mask of texts of some lengths."""
    return np.arange(max(lengths)) < np.array(lengths)[:, None]
