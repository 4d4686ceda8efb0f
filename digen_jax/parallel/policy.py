"""The policy: a family's guided velocity as a function of (tuned, fixed) parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int

from digen_jax.checkpoints.lora import LoraConfig, lora_init, lora_layers, merge
from digen_jax.checkpoints.quantization import quantized_layers
from digen_jax.diffusion.sampling import Velocity
from digen_jax.models.family import Family

Params = Any


class EncodedPrompts(NamedTuple):
    """Conditioning of prompts, replicated on a mesh.

    Attributes:
      conditioning: Conditioning of each prompt.
      null: Null conditioning of each prompt, or one row for all. None means that the policy does not read it.
    """

    conditioning: Any
    null: Any

    def at(self, rows: Int[Array, "n"]) -> "EncodedPrompts":
        """Returns the prompts with these indices; a single null row stays one."""
        null = jax.tree.map(lambda n: n if n.shape[0] == 1 else n[rows], self.null)
        return EncodedPrompts(jax.tree.map(lambda c: c[rows], self.conditioning), null)


GUIDED = "classifier-free", "embedded", "both"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Velocity of a family as a function of the tuned parameters.

    `split` divides the trees of the family's trained components once, into `tuned` and `base`, both by component.
    With LoRA, `tuned` contains the factors and `base` the full components, which may be quantized, so the reference is
    the same tree without the factors and needs no second copy. With full fine-tuning, `tuned` contains the components
    without the leaves that the family never trains; `base` contains those leaves or, if a reference is needed, the
    full initial components.

    Attributes:
      guidance_2: Guidance of experts after the first. 0 means `guidance`.
      reference_guidance: Guidance of the reference. None means that of the policy.
      true_cfg_scale: Scale of the unconditional pass, if the family's guidance is "both".
      components: Components to tune. Empty means all that the family trains.
      expert: Place in `family.trained` of the component that computes the velocity.
      samples_reference: Whether the sampler also evaluates the reference, at the steps that it stores.
      detach_unconditional: Whether the guidance's unconditional pass has no gradient.
    """

    family: Family
    guidance: float = 1.0
    lora: LoraConfig | None = None
    reference_guidance: float | None = None
    true_cfg_scale: float = 1.0
    guidance_2: float = 0.0
    components: tuple[str, ...] = ()
    expert: int = 0
    samples_reference: bool = False
    detach_unconditional: bool = False

    def __post_init__(self):
        kind = self.family.guidance
        for name, value, kinds in (
            ("guidance", self.guidance, GUIDED),
            ("reference_guidance", self.reference_guidance, GUIDED),
            ("true_cfg_scale", self.true_cfg_scale, ("both",)),
        ):
            if value is not None and value > 1 and kind not in kinds:
                raise ValueError(
                    f"{name} = {value}, but this model's guidance is {kind!r} and has no such number: set it to 1"
                )
        if self.guidance_2 and len(self.family.trained) == 1:
            raise ValueError(
                f"guidance_2 = {self.guidance_2}, but this model has one transformer: set it to 0"
            )
        if self.guidance_2 > 1 >= self.guidance:
            raise ValueError(
                f"guidance_2 = {self.guidance_2}, but guidance = {self.guidance}, where diffusers' pipeline has no "
                "unconditional pass: set guidance above 1, or guidance_2 to 0"
            )
        if unknown := {*self.components} - {*self.family.trained}:
            raise ValueError(
                f"components names {min(unknown)}, but this model trains {' and '.join(self.family.trained)}"
            )

    @property
    def experts(self) -> tuple["Policy", ...]:
        """Policies of the family's experts, in the order of its `trained`; mostly this one alone."""
        others = range(1, len(self.family.trained))
        second = self.guidance_2 or self.guidance
        return (self, *(dataclasses.replace(self, guidance=second, expert=i) for i in others))

    @property
    def tuned(self) -> tuple[str, ...]:
        """Components to tune, in the family's order."""
        return tuple(
            p for p in self.family.trained if p in (self.components or self.family.trained)
        )

    @property
    def reads_null(self) -> bool:
        """Whether this policy, or one with another `guidance`, may have an unconditional pass.

        The trainer's policy and the reference may have another `guidance`, but share the sampler's `true_cfg_scale`.
        """
        kind = self.family.guidance
        return kind == "classifier-free" or (kind == "both" and self.true_cfg_scale > 1)

    @property
    def sequences(self) -> int:
        """Number of sequences per image in the network: 2 with an unconditional pass, else 1."""
        return 2 if self._scale(self.guidance) > 1 else 1

    @property
    def reference_sequences(self) -> int:
        """Number of sequences per image for the reference."""
        return 2 if self._scale(self._of_reference) > 1 else 1

    def split(self, key: Array, trained: Params, reference: bool) -> tuple[Params, Params]:
        """Returns (tuned, base) before the first update; `reference` keeps the initial parameters.

        Raises:
          ValueError: the LoRA targets do not match the components.
        """
        if self.lora is not None:
            return self._factors(self.lora, key, trained), trained
        frozen, tuned = self._split_frozen(trained)
        if not reference:
            return tuned, frozen
        # Copies, because the trainer's updates donate the tuned arrays.
        return jax.tree.map(jnp.copy, tuned), trained

    def untuned(self, base: Params) -> Params:
        """Returns a `tuned` equal to the base model; `base` must be split with a reference."""
        if self.lora is not None:
            # One of the two factors is initialized to 0, so any key is valid.
            return self._factors(self.lora, jax.random.key(0), base)
        return self._split_frozen(base)[1]

    def sampler_base(self, base: Params) -> Params:
        """Returns the part of `base` that sampling needs, without a reference that only the trainer reads."""
        full = self.lora is not None or self.samples_reference
        return base if full else self._split_frozen(base)[0]

    def merged(self, tuned: Params, base: Params) -> Params:
        """Returns the full components with the tuned parameters merged, for export."""
        if self.lora is not None:
            components = {part: merge(base[part], tuned[part], self.lora.scale) for part in tuned}
            return dict(base) | components
        frozen, _ = self._split_frozen(base)
        return unflatten_dict(flatten_dict(frozen) | flatten_dict(tuned))

    def velocity(self, tuned: Params, base: Params, conditioning: Any, null: Any) -> Velocity:
        """Returns the guided velocity of the policy; must be called while tracing."""
        if (lora := self.lora) is None:
            variables = _collections(self.merged(tuned, base))
            return self._guided(variables, conditioning, null, self.guidance)
        variables = _collections(base)
        for part, factors in tuned.items():
            variables[part]["lora"] = factors
        guided = self._guided(variables, conditioning, null, self.guidance)

        def velocity(x: Float[Array, "b ..."], sigma: Float[Array, "b"]) -> Float[Array, "b ..."]:
            with lora_layers(lora.scale):
                return guided(x, sigma)

        return velocity

    def reference(self, base: Params, conditioning: Any, null: Any) -> Velocity:
        """Returns the guided velocity of the base model, without any LoRA, even an initial one."""
        return self._guided(_collections(base), conditioning, null, self._of_reference)

    @property
    def _of_reference(self) -> float:
        return self.guidance if self.reference_guidance is None else self.reference_guidance

    def _scale(self, guidance: float) -> float:
        """Returns the guidance scale of an unconditional pass; at 1 or less there is no such pass.

        This follows diffusers' pipelines (`do_classifier_free_guidance`, `do_true_cfg`), where model cards of few-step
        models recommend a guidance of 0. Z-Image's scale is its pipeline's `guidance_scale` plus one.
        """
        kind = self.family.guidance
        return {"classifier-free": guidance, "both": self.true_cfg_scale}.get(kind, 1.0)

    def _guided(self, variables: Params, conditioning: Any, null: Any, guidance: float) -> Velocity:
        """Returns the velocity with the family's guidance; `null` has the rows of `conditioning`, or one for all."""
        kind = self.family.guidance
        embedded = guidance if kind in ("embedded", "both") else None
        scale = self._scale(guidance)
        first, own = self.family.trained[0], self.family.trained[self.expert]
        variables = variables | {first: variables[own]}

        @quantized_layers()  # inside of the LoRA's context, which adds to their results
        def velocity(x: Float[Array, "b ..."], sigma: Float[Array, "b"]) -> Float[Array, "b ..."]:
            if scale <= 1:
                return self.family.velocity(variables, x, sigma, conditioning, embedded)

            def interleave(a: Array, b: Array) -> Array:
                """Interleaves rows as a0 b0 a1 b1 ...: unlike concatenation this keeps rows on their devices."""
                return jnp.stack([a, b], axis=1).reshape(2 * a.shape[0], *a.shape[1:])

            pairs = jax.tree.map(
                lambda n, c: interleave(jnp.broadcast_to(n, c.shape), c), null, conditioning
            )
            both = interleave(x, x), interleave(sigma, sigma)
            v = self.family.velocity(variables, *both, pairs, embedded)
            unconditional = v[0::2]
            if self.detach_unconditional:
                unconditional = jax.lax.stop_gradient(unconditional)
            return self.family.guided(unconditional, v[1::2], scale)

        return velocity

    def _factors(self, lora: LoraConfig, key: Array, trained: Params) -> Params:
        # In the family's order: names in a program's output tree are sorted.
        ordered = {part: trained[part] for part in self.tuned}
        return lora_init(key, ordered, lora, self.family.lists)

    def _split_frozen(self, trained: Params) -> tuple[Params, Params]:
        """Returns (leaves that are never trained, the others)."""
        frozen, others = dict[tuple, Any](), dict[tuple, Any]()
        for (part, *path), leaf in flatten_dict(trained).items():
            never = part not in self.tuned or "/".join(path) in self.family.frozen.get(part, ())
            (frozen if never else others)[part, *path] = leaf
        return unflatten_dict(frozen), unflatten_dict(others)


def _collections(trained: Params) -> Params:
    """Returns the variables of the family's velocity, given only parameters."""
    return {part: {"params": tree} for part, tree in trained.items()}


AS_WRITTEN = {"xla_allow_excess_precision": False}


def jit_as_written(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """Compiles with `jax.jit` but keeps every rounding to bfloat16, so that equal weights give equal ratios.

    By default XLA omits roundings inside fusions. Programs then round at different places: sampler and trainer, and
    within one program the passes with and without a backward pass. Programs in float32 are unchanged. The result
    cannot be called inside another program.

    Args:
      function: Function to compile.
      options: Other options of `jax.jit`, except compiler_options.
    """
    return jax.jit(function, compiler_options=AS_WRITTEN, **options)
