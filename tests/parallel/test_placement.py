import itertools
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from digen_jax.errors import ConfigError
from digen_jax.parallel.mesh import ALL, ShardingRules, axis_sizes
from digen_jax.parallel.placement import (
    MeshSizes,
    RolloutAxes,
    TrainerAxes,
    check_processes,
    devices_per_mesh,
    fit_mesh_sizes,
    make_placement,
)
from tests.parallel import toy


def asked(rollout, trainer, workers=1, **fields):
    return toy.opened(toy.config(**toy.meshes(rollout, trainer, workers) | fields)).placement


def placed(rollout, trainer, devices=8, workers=1, **fields):
    given = asked(rollout, trainer, workers, **fields)
    return make_placement(given.meshes, ShardingRules(given.rules), jax.devices()[:devices])


def shape_of(mesh):
    """The sizes of the axes that are used."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def local_shape(array):
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


def test_fsdp_splits_the_largest_axis_that_divides_and_leaves_small_ones_whole(monkeypatch):
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 60)
    shapes = [s for n in range(4) for s in itertools.product((1, 3, 4, 6, 10, 12), repeat=n)]
    for shape, devices in itertools.product(shapes, (1, 2, 3, 4)):
        spec = ShardingRules(((".*", "fsdp"),)).spec("any/kernel", shape, axis_sizes(fsdp=devices))
        divisible = [size for size in shape if size % devices == 0]
        if devices == 1 or np.prod(shape) < 60 or not divisible:
            assert spec == PartitionSpec()
        else:
            split = [i for i, name in enumerate(spec) if name is not None]
            assert [spec[i] for i in split] == ["fsdp"]
            assert shape[split[0]] == max(divisible)


def test_a_parameter_without_a_rule_is_named():
    group = placed((4, 1), (2, 2), placement__rules=(("attn", "fsdp"),)).trainer
    with pytest.raises(ConfigError, match=r"^config\.placement\.rules .*ff/net/kernel"):
        group.params({"ff": {"net": {"kernel": np.ones((2, 2))}}})


@pytest.mark.parametrize(
    ("rollout", "trainer", "workers", "devices", "described"),
    [
        ((1, 3), (2, 2), 1, 8, "7 CPU devices: 3 for rollout, 4 for training"),
        ((1, 2), (2, 1), 3, 8, "8 CPU devices: 6 for rollout (3 workers), 2 for training"),
        ((0, 1), (2, 3), 1, 8, "6 CPU devices for rollout and training alternately"),
        ((4, 1), (2, 2), 1, 1, "1 CPU device for rollout and training alternately"),
    ],
)
def test_meshes_take_the_devices_in_turn(rollout, trainer, workers, devices, described):
    found = placed(rollout, trainer, devices, workers)
    assert found.describe() == described
    assert found.colocated == (devices == 1 or rollout[0] == 0)
    meshes = [group.mesh for group in (*found.rollouts, found.trainer)]
    assert all(mesh.axis_names == ALL for mesh in meshes)
    taken = [device for mesh in meshes for device in mesh.devices.flat]
    assert taken == jax.devices()[: len(taken)]
    if found.colocated:
        assert found.rollout is found.trainer
    else:
        assert found.rollout is found.rollouts[0] and len(found.rollouts) == workers
    if devices > 1:
        used = {"data": trainer[0], "fsdp": trainer[1]}
        assert shape_of(found.trainer.mesh) == {axis: n for axis, n in used.items() if n > 1}


# Requested and fitted: (workers, data, fsdp) of rollout, (data, fsdp, time) of the trainer.
@pytest.mark.parametrize(
    ("wanted", "devices", "found"),
    [
        (((1, 4, 1), (2, 2, 1)), 16, ((1, 4, 1), (2, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 8, ((1, 4, 1), (2, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 7, ((1, 2, 1), (2, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 5, ((1, 2, 1), (1, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 4, ((1, 2, 1), (1, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 3, ((1, 1, 1), (1, 2, 1))),
        (((1, 4, 1), (2, 2, 1)), 2, ((1, 1, 1), (1, 1, 1))),
        (((1, 4, 1), (2, 2, 1)), 1, ((1, 0, 1), (1, 1, 1))),
        (((1, 4, 1), (2, 2, 2)), 8, ((1, 4, 1), (1, 2, 2))),
        (((3, 2, 1), (2, 1, 1)), 6, ((3, 1, 1), (2, 1, 1))),
        (((1, 0, 1), (4, 3, 1)), 8, ((1, 0, 1), (2, 3, 1))),
    ],
)
def test_meshes_are_fitted_to_fewer_devices(wanted, devices, found):
    (workers, data, fsdp), (*trainer, time) = wanted
    sizes = fit_mesh_sizes(
        MeshSizes(RolloutAxes(data, fsdp, workers), TrainerAxes(*trainer, time)), devices
    ).as_dict()
    assert tuple(sizes["rollout"][axis] for axis in ("workers", "data", "fsdp")) == found[0]
    assert tuple(sizes["trainer"][axis] for axis in ("data", "fsdp", "time")) == found[1]


def test_where_devices_are_few_parameters_stay_split_and_batches_do_not():
    wanted = MeshSizes(RolloutAxes(0), TrainerAxes(data=4, fsdp=2, tensor=2))
    assert fit_mesh_sizes(wanted, 4).trainer == TrainerAxes(data=1, fsdp=2, tensor=2)
    assert fit_mesh_sizes(wanted, 2).trainer == TrainerAxes(data=1, tensor=2)


def test_batches_are_whole_over_tensor_and_a_sampler_keeps_it():
    found = placed((0, 1), (2, 1, 2, 2), trainer__pack=2)
    assert shape_of(found.trainer.mesh) == {"time": 2, "data": 2, "tensor": 2}
    assert shape_of(found.rollout.mesh) == {"data": 4, "tensor": 2}
    assert (found.trainer.images, found.rollout.images) == (2, 4)
    assert local_shape(jax.device_put(np.zeros((8, 3)), found.trainer.batch)) == (4, 3)
    assert local_shape(jax.device_put(np.zeros((8, 3)), found.trainer.merged)) == (2, 3)


def test_a_trainer_mesh_may_have_an_axis_for_time():
    meshes = (2, 1), (1, 2, 3)
    found = placed(*meshes, trainer__pack=3)
    assert devices_per_mesh(asked(*meshes, trainer__pack=3).meshes, 8) == (2, 6)
    assert shape_of(found.trainer.mesh) == {"time": 3, "fsdp": 2}
    assert found.trainer.mesh.devices.ravel().tolist() == jax.devices()[2:8]
    assert (found.trainer.time, found.rollout.time) == (3, 1)
    batch = jax.device_put(np.zeros((5, 8, 3)), found.trainer.batch_of_steps)
    assert local_shape(batch) == (5, 4, 3)
    packed = jax.device_put(np.zeros((5, 6, 8)), found.trainer.passes(1))
    assert local_shape(packed) == (5, 2, 4)
    assert placed(*meshes, devices=1, trainer__pack=3).trainer.time == 1


@pytest.mark.parametrize(
    ("rollout", "field"), [(1, "config.placement.rollout.data"), (0, "config.placement.trainer")]
)
def test_processes_of_one_job_sample_and_train_in_turn_on_all_devices(rollout, field):
    devices = [mock.Mock(spec=jax.Device, process_index=number // 2) for number in range(4)]
    with pytest.raises(ConfigError, match=f"^{field} "):
        check_processes(asked((rollout, 1), (3, 1)).meshes, devices)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_fsdp_splits_every_parameter_on_both_meshes(tuning, monkeypatch):
    """Each device holds 1/n of every parameter, its moments and its average, before and after a weight sync."""
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 1)
    lora = dict(lora__rank=4) if tuning == "lora" else {}
    system = toy.system(toy.config(**toy.meshes((1, 4), (2, 2)), **lora, trainer__ema=0.5))
    state = system.trainer.init(system.start)
    weights = system.rollout_weights(state.tuned)
    trainer = [state.tuned, state.ema, system.base, moments(state)]
    for trees, devices in ((trainer, 2), ([weights.tuned, weights.base], 4)):
        for leaf in jax.tree.leaves(trees):
            assert np.prod(local_shape(leaf)) * devices == leaf.size


def moments(state):
    return [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
