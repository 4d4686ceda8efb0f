"""Torch modules as oracles: random parameters, their state_dict as a flax tree, trees compared."""

import re

import jax
import numpy as np
import torch
from flax import traverse_util

from digen_jax.checkpoints.tensors import file_shape, tensor_names

LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Redraw every parameter, norm scales around 1 and biases around 0; returns the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / np.sqrt(parameter[0].numel()))
            else:
                parameter.copy_(0.3 * noise + (1.0 if name.endswith("weight") else 0.0))
    return module.eval()


def to_flax(state_dict: dict, template, lists: tuple[str, ...]):
    """The tree of `template` (arrays or shapes) filled from a state_dict, each tensor used once."""
    entry = re.compile(rf"({'|'.join(lists)})_(\d+)(?:to(\d+))?")
    unused = dict(state_dict)

    def read(done: tuple[str, ...], rest: tuple[str, ...]) -> np.ndarray:
        if not rest:
            tensor = unused.pop(".".join((*done[:-1], LEAVES.get(done[-1], done[-1]))))
            array = tensor.detach().to(torch.float32).numpy()
            if done[-1] == "kernel":
                array = array.transpose(*range(2, array.ndim), 1, 0)
            return array
        match = entry.fullmatch(rest[0])
        if match is None:
            return read((*done, rest[0]), rest[1:])
        name, first, last = match.groups()
        if last is None:
            return read((*done, name, first), rest[1:])
        run = range(int(first), int(last) + 1)
        return np.stack([read((*done, name, str(i)), rest[1:]) for i in run])

    flat = traverse_util.flatten_dict(template)
    tree = {path: read((), path) for path in flat}
    assert not unused, f"tensors without a place in the flax tree: {sorted(unused)}"
    for path, array in tree.items():
        assert array.shape == flat[path].shape, ("/".join(path), array.shape, flat[path].shape)
    return traverse_util.unflatten_dict(tree)


def file_shapes(tree, lists: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes in a file of all tensors of a flax tree, by their names there."""
    return {
        name: file_shape(path, leaf.shape, lists)
        for path, leaf in traverse_util.flatten_dict(tree).items()
        for name in tensor_names(path, lists)
    }


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by state_dict name after `backward`, zeros where there is none (buffers too)."""
    grads = {n: torch.zeros_like(t) for n, t in module.state_dict().items()}
    grads |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return grads


def time_features(time: torch.Tensor) -> torch.Tensor:
    """diffusers' `Timesteps`, whose float32 exp differs by processor: a guidance of 3500 multiplies its error."""
    exponents = np.arange(128, dtype=np.float32) * np.float32(-np.log(10000.0)) / np.float32(128)
    frequencies = torch.tensor(np.exp(exponents.astype(np.float64)).astype(np.float32))
    angles = (time[:, None].float() * frequencies).double()
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def worst(actual, expected, whole: bool = False) -> tuple[float, str]:
    """Largest |difference| over a tensor's (or the whole tree's) largest element, and its path."""
    actual = jax.tree_util.tree_flatten_with_path(actual)[0]
    expected = jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    pairs = [
        (path, np.asarray(a, np.float32), np.asarray(e))
        for (path, a), e in zip(actual, expected, strict=True)
    ]
    largest = max(float(np.abs(e).max()) for _, _, e in pairs)
    errors = []
    for path, a, e in pairs:
        assert a.shape == e.shape, (jax.tree_util.keystr(path), a.shape, e.shape)
        scale = largest if whole else float(np.abs(e).max())
        errors.append((float(np.abs(a - e).max()) / scale, jax.tree_util.keystr(path)))
    return max(errors)
