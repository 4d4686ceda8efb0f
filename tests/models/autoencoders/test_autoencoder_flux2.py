"""FLUX.2's autoencoder against diffusers' class and pipeline."""

import functools
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from flax.traverse_util import flatten_dict

from digen_jax.checkpoints import folder
from digen_jax.checkpoints.tensors import file_shape, tensor_names
from digen_jax.models.autoencoders.autoencoder_flux2 import (
    AXES,
    IGNORED,
    AutoencoderKLFlux2,
    AutoencoderKLFlux2Config,
)
from digen_jax.models.autoencoders.autoencoder_kl import LISTS
from digen_jax.models.family import logical_axes
from tests.models import parity

TINY = {
    "block_out_channels": [8, 12],
    "decoder_block_out_channels": [4, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 3,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "batch_norm_eps": 0.01,
}
SEED = jax.random.key(0)


def shapes(model: AutoencoderKLFlux2):
    side = 2 ** len(model.config.block_out_channels)
    images = jnp.zeros((1, side, side, 3))
    return jax.eval_shape(lambda key: model.init(key, images, method="reconstruct"), SEED)["params"]


def tensors(module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if name not in IGNORED}


@functools.cache
def pair():
    """diffusers' module, ours, and its parameters in our tree."""
    module = parity.randomise(diffusers.AutoencoderKLFlux2(**TINY))
    generator = torch.Generator().manual_seed(1)
    module.bn.running_mean.normal_(generator=generator)
    module.bn.running_var.uniform_(0.01, 2, generator=generator)
    model = AutoencoderKLFlux2(AutoencoderKLFlux2Config.from_config(TINY))
    return module, model, parity.to_flax(tensors(module), shapes(model), LISTS)


def to_torch(array) -> torch.Tensor:
    return torch.tensor(np.asarray(array)).permute(0, 3, 1, 2).requires_grad_()


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().permute(0, 2, 3, 1).numpy()


def pipeline_decode(module, latents: torch.Tensor) -> torch.Tensor:
    """The end of Flux2KleinPipeline's call, from its latents before they are packed."""
    mean, variance = (
        statistic.view(1, -1, 1, 1) for statistic in (module.bn.running_mean, module.bn.running_var)
    )
    latents = latents * torch.sqrt(variance + module.config.batch_norm_eps) + mean
    return module.decode(Flux2KleinPipeline._unpatchify_latents(latents)).sample


def forward(model: AutoencoderKLFlux2, params, images, latents) -> dict:
    def run(model, images, latents):
        mean, logvar = model.encode(images)
        decoded = model.decode(model.unscale_latents(latents))
        return {"decoded": decoded, "logvar": logvar, "scaled": model.scale_latents(mean)}

    return model.apply({"params": params}, images, latents, method=run)


def test_equals_diffusers_forward_and_in_gradients_of_its_input():
    module, model, params = pair()
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.uniform(-1, 1, (2, 13, 9, 3)), jnp.float32)
    latents = jnp.asarray(rng.normal(size=(2, 3, 2, 12)), jnp.float32)
    torch_images, torch_latents = to_torch(images), to_torch(latents)
    moments = module.encode(torch_images).latent_dist
    outputs = {
        "decoded": pipeline_decode(module, torch_latents),
        "logvar": moments.logvar,
        # A batch norm out of training norms by its statistics.
        "scaled": module.bn(Flux2KleinPipeline._patchify_latents(moments.mean)),
    }
    expected = {k: from_torch(v) for k, v in outputs.items()}
    weights = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in expected.items()}
    sum((v * to_torch(weights[k])).sum() for k, v in outputs.items()).backward()

    @jax.jit
    def run(params, *arguments):
        actual, pull = jax.vjp(functools.partial(forward, model, params), *arguments)
        return actual, pull(weights)

    with jax.default_matmul_precision("highest"):
        actual, grads = run(params, images, latents)
    assert parity.worst(actual, expected)[0] < 1e-5
    expected_grads = [from_torch(t.grad) for t in (torch_images, torch_latents)]
    assert parity.worst(grads, expected_grads)[0] < 1e-4


def test_unscaling_undoes_scaling():
    _, model, params = pair()
    latents = np.random.default_rng(0).normal(size=(2, 4, 6, 3)).astype(np.float32)

    def there_and_back(model, latents):
        return model.unscale_latents(model.scale_latents(latents))

    run = jax.jit(lambda latents: model.apply({"params": params}, latents, method=there_and_back))
    again = run(latents)
    np.testing.assert_allclose(again, latents, rtol=1e-4, atol=1e-5)


def test_the_real_autoencoder_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        module = diffusers.AutoencoderKLFlux2()
    config = AutoencoderKLFlux2Config.from_config(dict(module.config) | {"force_upcast": True})
    assert config == AutoencoderKLFlux2Config()
    tree = shapes(AutoencoderKLFlux2(config))
    found = {}
    for path, leaf in flatten_dict(tree).items():
        (tensor,) = tensor_names(path, LISTS)
        found[tensor] = file_shape(path, leaf.shape, LISTS)
    assert found == {k: tuple(v.shape) for k, v in tensors(module).items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == 84_046_371


def test_a_folder_is_read_and_written(tmp_path):
    module, model, params = pair()
    module.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert AutoencoderKLFlux2Config.from_config(config) == model.config
    read = folder.read_params(tmp_path / "theirs", shapes(model), LISTS, ignore=IGNORED)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    folder.write_params(tmp_path / "ours", read, LISTS, config)
    again, report = diffusers.AutoencoderKLFlux2.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert report.pop("missing_keys") == list(IGNORED) and not any(report.values())
    for key, tensor in tensors(module).items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_kernels_have_logical_axes_and_statistics_none():
    _, model, _ = pair()
    axes = logical_axes(shapes(model), AXES, LISTS)
    assert axes["bn"] == {"running_mean": (None,), "running_var": (None,)}
    assert axes["quant_conv"]["kernel"] == (None, None, "conv_in", "conv_out")
    assert axes["encoder"]["conv_norm_out"]["scale"] == ("conv_out",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch_size", [1, 1]),
        ("decoder_block_out_channels", [4]),
        ("decoder_block_out_channels", [4, 6]),
        ("norm_num_groups", 5),
        ("batch_norm_eps", -1.0),
        ("scaling_factor", 0.5),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        AutoencoderKLFlux2Config.from_config({**TINY, field: value})
