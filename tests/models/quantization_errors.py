"""Errors of frozen weights on tiny random pipelines, relative to float32, for docs/performance.md.

python -m tests.models.quantization_errors
"""

import pathlib
import tempfile

import jax
import numpy as np

from digen_jax.diffusion.sampling import image_keys
from digen_jax.families import load_family, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.parallel.policy import Policy, jit_as_written
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.models.families import PROMPTS, STEPS
from tests.models.flux import spec as flux
from tests.models.qwen_image import spec as qwen_image
from tests.models.sd3 import spec as sd3

FAMILIES = {"SD3.5": sd3.PIPELINE, "FLUX.1": flux.PIPELINE, "Qwen-Image": qwen_image.PIPELINE}
FROZEN = ("bfloat16", "int8", "float8_e4m3fn")


def results(spec, folder, arithmetic, frozen):
    """(velocity of noise at sigma 0.5, latents after four steps) of three prompts, without guidance."""
    group, rows = all_devices(jax.devices()[:1]), np.arange(len(PROMPTS), dtype=np.int32)
    family = load_family(folder, arithmetic, max_sequence_length=spec.tokens)
    params = read_parts(family, folder, family.shapes(), group, frozen)
    base = {part: params.pop(part) for part in family.trained}
    policy = Policy(family)
    sampler = Sampler(policy, group, SamplerSettings(spec.size, STEPS, family.solver))
    weights = Weights(*policy.split(jax.random.key(0), base, reference=False), params)
    prompts = sampler.encode(weights, said(*PROMPTS))
    keys = image_keys(jax.random.key(0), rows, np.zeros_like(rows))
    latents = sampler.generate(weights, prompts, rows, keys).latents
    x, sigma = jax.random.normal(jax.random.key(1), latents.shape), np.full(len(rows), 0.5, "f4")
    run = jit_as_written(lambda base, given: policy.reference(base, given, None)(x, sigma))
    return jax.device_get((run(base, prompts.conditioning), latents))


def main() -> None:
    """Prints a row for each family and type."""
    print(
        "| pipeline | frozen | arithmetic | velocity | latents |\n| --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name, spec in FAMILIES.items():
            folder = spec.folder(pathlib.Path(scratch), spec.kinds[0])
            exact = results(spec, folder, "float32", "float32")
            for arithmetic in ("float32", "bfloat16"):
                for frozen in FROZEN:
                    found = results(spec, folder, arithmetic, frozen)
                    errors = [
                        f"{np.linalg.norm(a - b) / np.linalg.norm(b):.2%}"
                        for a, b in zip(found, exact, strict=True)
                    ]
                    row = [name, frozen.partition("_")[0], arithmetic, *errors]
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
