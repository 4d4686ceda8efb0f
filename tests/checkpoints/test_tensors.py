import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from digen_jax.checkpoints import tensors
from tests.checkpoints import toy


def stored(folder: pathlib.Path, dtype=torch.float32, **changes) -> dict[str, tensors.StoredTensor]:
    """The torch toy in a file, some tensors changed (None: left out), opened."""
    state = {name: tensor.to(dtype) for name, tensor in toy.TorchToy().state_dict().items()}
    state = {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}
    file = folder / "toy.safetensors"
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    return tensors.open_file(file)


def test_read_network_computes_what_torch_computes(tmp_path):
    params = tensors.read_tree(stored(tmp_path), toy.template(), toy.LISTS)
    np.testing.assert_allclose(toy.output(params), toy.torch_output(toy.TorchToy()), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [None, jnp.bfloat16, jnp.float16])
def test_half_precision_is_read_and_cast(tmp_path, dtype, wanted):
    params = tensors.read_tree(stored(tmp_path, dtype), toy.template(), toy.LISTS, dtype=wanted)
    kernel = params["linear_1"]["kernel"]
    state = toy.TorchToy().linear_1.weight.detach().to(dtype)
    torch_wanted = {None: torch.float32, jnp.bfloat16: torch.bfloat16, jnp.float16: torch.float16}
    expected = state.to(torch_wanted[wanted]).T
    assert kernel.dtype == (wanted or jnp.float32)
    np.testing.assert_array_equal(np.asarray(kernel, np.float32), expected.float().numpy())


def test_integer_leaves_keep_their_type(tmp_path):
    safetensors.torch.save_file({"ids": torch.arange(4), "w": torch.ones(2)}, tmp_path / "i")
    shapes = {"ids": jax.ShapeDtypeStruct((4,), jnp.int32), "w": jax.ShapeDtypeStruct((2,), "f4")}
    read = tensors.read_tree(tensors.open_file(tmp_path / "i"), shapes, (), dtype=jnp.bfloat16)
    assert (read["ids"].dtype, read["w"].dtype) == (jnp.int32, jnp.bfloat16)
    np.testing.assert_array_equal(read["ids"], np.arange(4))


def counted(tensor, reads):
    """A stored tensor that notes the shape of every part read."""

    def read(index):
        part = tensor.read(index)
        reads.append(part.shape)
        return part

    return tensor._replace(read=read)


def test_each_part_of_a_sharded_tensor_is_read_once(tmp_path):
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    specs = {
        ("blocks_0to2", "to_in", "kernel"): PartitionSpec(None, "x", "y"),
        ("blocks_3", "to_in", "kernel"): PartitionSpec("y"),
        ("proj", "kernel"): PartitionSpec(None, None, None, ("x", "y")),
    }
    template = toy.template()
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), template)
    for (*outer, leaf), spec in specs.items():
        node = shardings
        for part in outer:
            node = node[part]
        node[leaf] = NamedSharding(mesh, spec)
    plain = stored(tmp_path)
    reads = {name: [] for name in plain}
    noted = {name: counted(tensor, reads[name]) for name, tensor in plain.items()}
    params = tensors.read_tree(noted, template, toy.LISTS, shardings)

    alone = flatten_dict(tensors.read_tree(plain, template, toy.LISTS))
    for path, leaf in flatten_dict(params).items():
        assert leaf.sharding.spec == specs.get(path, PartitionSpec())
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(alone[path])[shard.index])
    shards = {
        "blocks.1.to_in.weight": [(6, 4)] * 4,
        "blocks.3.to_in.weight": [(12, 4)] * 2,
        "proj.weight": [(2, 3, 3, 2)] * 4,
        "linear_1.weight": [(8, 8)],
    }
    assert {name: reads[name] for name in shards} == shards
    assert all(sum(map(np.prod, reads[name])) == np.prod(plain[name].shape) for name in plain)


def test_layers_of_a_stack_can_lie_on_different_devices(tmp_path):
    mesh = jax.make_mesh((3,), ("layers",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    template = {"blocks_0to2": toy.template()["blocks_0to2"]}
    sharding = NamedSharding(mesh, PartitionSpec("layers"))
    params = tensors.read_tree(stored(tmp_path), template, toy.LISTS, sharding, ignore=("*",))
    kernel = params["blocks_0to2"]["to_in"]["kernel"]
    for i, shard in enumerate(kernel.addressable_shards):
        expected = toy.TorchToy().blocks[i].to_in.weight.detach().numpy().T
        np.testing.assert_array_equal(shard.data[0], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.2.to_in.weight": None}, r"blocks.2.to_in.weight .*\[12, 8\] .*toy.safetensors"),
        (
            {"proj.weight": torch.zeros(3, 8, 3, 2)},
            r"proj.weight .*toy.safetensors .*\[3, 8, 3, 2\]",
        ),
        ({"blocks.4.norm.bias": torch.zeros(8)}, r"blocks.4.norm.bias .*\[8\] .*toy.safetensors"),
        ({"linear_1.bias": None, "extra": torch.zeros(1), "embed.weight": None}, "2 more"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tensors.read_tree(stored(tmp_path, **changes), toy.template(), toy.LISTS)
    assert "\n" not in str(error.value)


def test_surplus_tensors_can_be_ignored_by_pattern(tmp_path):
    opened = stored(tmp_path, **{"x.position_ids": torch.zeros(1), "y.other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"y.other(?!.*more)"):
        tensors.read_tree(opened, toy.template(), toy.LISTS, ignore=("*.position_ids",))


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.safetensors"):
        tensors.open_file(tmp_path / "none.safetensors")
    file = next(iter(stored(tmp_path).values())).file
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"toy.safetensors"):
        tensors.open_file(file)


def test_written_tensors_are_torchs(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:])
    template = toy.template()

    def split_last(leaf):
        last = "x" if leaf.shape[-1] % 4 == 0 else None
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - 1), last))

    shardings = jax.tree.map(split_last, template)
    params = tensors.read_tree(stored(tmp_path), template, toy.LISTS, shardings)
    tensors.write_file(tmp_path / "out", dict(tensors.file_tensors(params, toy.LISTS)))
    written = safetensors.torch.load_file(tmp_path / "out")
    state = toy.TorchToy().state_dict()
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], state[name]) for name in state)


# ------------------------------------------------------------------------------ names and layouts

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
    assert tensors.tensor_names(path, LISTS) == expected


def test_impossible_runs_are_refused():
    with pytest.raises(ValueError, match="blocks_3to1"):
        tensors.tensor_names(("blocks_3to1", "kernel"), LISTS)
    with pytest.raises(ValueError, match="blocks_0to1/net_0to1/kernel"):
        tensors.tensor_names(("blocks_0to1", "net_0to1", "kernel"), LISTS)
    with pytest.raises(ValueError, match=r"\[3, 4, 5\], .* 2 layers"):
        tensors.file_shape(("blocks_0to1", "kernel"), (3, 4, 5), LISTS)


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
    assert tensors.file_shape(("kernel",), shape, LISTS) == stored
    assert tensors.file_shape(("blocks_0to6", "kernel"), (7, *shape), LISTS) == stored
