import jax.numpy as jnp
import numpy as np
import pytest
import torch

from digen_jax.checkpoints import names

LISTS = ("blocks", "net", "to_out")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("proj", "kernel"), ["proj.weight"]),
        (("proj", "bias"), ["proj.bias"]),
        (("norm", "scale"), ["norm.weight"]),
        (("token", "embedding"), ["token.weight"]),
        (("pos_embed", "pos_embed"), ["pos_embed.pos_embed"]),
        (("time", "linear_1", "kernel"), ["time.linear_1.weight"]),
        (("blocks_11", "to_out_0", "bias"), ["blocks.11.to_out.0.bias"]),
        (
            ("blocks_9to11", "ff", "net_2", "kernel"),
            [f"blocks.{i}.ff.net.2.weight" for i in (9, 10, 11)],
        ),
        (("blocks_4to4", "scale"), ["blocks.4.weight"]),
        (("blocks_0toe", "scale"), ["blocks_0toe.weight"]),
    ],
)
def test_tensor_names(path, expected):
    assert names.tensor_names(path, LISTS) == expected


def test_only_runs_are_scanned():
    assert names.is_scanned(("blocks_4to4", "kernel"), LISTS)
    assert not names.is_scanned(("blocks_4", "kernel"), LISTS)
    assert not names.is_scanned(("linear_1to2", "kernel"), LISTS)


def test_impossible_runs_are_refused():
    with pytest.raises(ValueError, match="blocks_3to1 ends before it begins"):
        names.tensor_names(("blocks_3to1", "kernel"), LISTS)
    with pytest.raises(ValueError, match="blocks_0to1/net_0to1/kernel is scanned twice"):
        names.tensor_names(("blocks_0to1", "net_0to1", "kernel"), LISTS)
    with pytest.raises(ValueError, match=r"has shape \[3, 4, 5\], but should stack 2 layers"):
        names.file_shape(("blocks_0to1", "kernel"), (3, 4, 5), LISTS)


@pytest.mark.parametrize(
    ("shape", "module"),
    [
        ((4, 5), torch.nn.Linear(4, 5)),
        ((3, 4, 5), torch.nn.Conv1d(4, 5, 3)),
        ((2, 3, 4, 5), torch.nn.Conv2d(4, 5, (2, 3))),
        ((1, 2, 3, 4, 5), torch.nn.Conv3d(4, 5, (1, 2, 3))),
    ],
)
def test_kernels_have_torch_layout(shape, module):
    stored = tuple(module.weight.shape)
    assert names.file_shape(("kernel",), shape, LISTS) == stored
    assert names.file_shape(("blocks_0to6", "kernel"), (7, *shape), LISTS) == stored
    kernel = np.arange(np.prod(shape)).reshape(shape)
    tensor = kernel.transpose(names.file_axes("kernel", kernel.ndim))
    back = tensor.transpose(names.flax_axes("kernel", tensor.ndim))
    np.testing.assert_array_equal(back, kernel)


@pytest.mark.parametrize("leaf", ["scale", "bias", "embedding", "pos_embed"])
def test_other_leaves_keep_their_layout(leaf):
    assert names.file_shape((leaf,), (3, 4, 5), LISTS) == (3, 4, 5)
    assert names.flax_axes(leaf, 3) == (0, 1, 2)
    assert jnp.zeros(()).transpose(names.file_axes(leaf, 0)).shape == ()
