"""The loop on a linear regression, against the same written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.shapes.fit import FitSettings, fit
from tests.metrics import metrics

SETTINGS = FitSettings(
    steps=12,
    learning_rate=0.05,
    muon_rate=0.0,
    final_rate=0.25,
    warmup=3,
    ema=0.5,
    clip_norm=0.3,
    checkpoint_every=4,
    log_every=3,
)
KEY = jax.random.key(3)


def start() -> dict:
    rng = np.random.default_rng(0)
    return {"kernel": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "bias": jnp.zeros(3)}


def batch(step: int):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, 4)).astype(np.float32)
    return x, x[:, :3] * 2 - 1


def loss(params, inputs, key):
    x, y = inputs
    error = x @ params["kernel"] + params["bias"] - y + jax.random.normal(key, y.shape)
    return jnp.mean(error**2), {"mse": jnp.mean(error**2)}


def by_hand(steps: int) -> tuple[dict, list[float]]:
    """(average, norms of the gradients): Adam with b2 0.99 after clipping, both averages young at first."""
    params = {name: np.asarray(value, np.float64) for name, value in start().items()}
    average = dict(params)
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    norms = []
    for step in range(steps):
        x, y = batch(step)
        noise = np.asarray(jax.random.normal(jax.random.fold_in(KEY, step), y.shape))
        error = 2 * (x @ params["kernel"] + params["bias"] - y + noise) / y.size
        gradient = {"kernel": x.T @ error, "bias": error.sum(0)}
        norms.append(math.sqrt(sum((g**2).sum() for g in gradient.values())))
        way = (step - 3) / (12 - 3)
        cosine = 0.25 + 0.75 * (1 + math.cos(math.pi * way)) / 2
        rate = 0.05 * (step / 3 if step < 3 else cosine)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, g in gradient.items():
            g = g * min(1, 0.3 / norms[-1])
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g**2
            mean, variance = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.99 ** (step + 1))
            params[name] = params[name] - rate * mean / (np.sqrt(variance) + 1e-8)
            average[name] = decay * average[name] + (1 - decay) * params[name]
    return average, norms


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with jax.default_matmul_precision("highest"):
        return fit(start(), loss, batch, SETTINGS, folder, KEY), metrics(folder)


def test_steps_averages_and_rates_are_as_by_hand(unbroken):
    found, history = unbroken
    expected, norms = by_hand(12)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    assert [line["step"] for line in history] == [3, 6, 9, 12]
    np.testing.assert_allclose([line["gradient_norm"] for line in history], norms[2::3], rtol=1e-4)
    assert norms[5] > 0.3  # tests the clipping, too


@pytest.mark.parametrize("last", [2, 7])
def test_stopped_and_started_again_it_ends_as_if_it_had_not(tmp_path, unbroken, last):
    """Before the first checkpoint, and between the first and the second."""
    asked = []

    def failing(step):
        if step == last:
            raise KeyboardInterrupt
        return batch(step)

    def noted(step):
        asked.append(step)
        return batch(step)

    with jax.default_matmul_precision("highest"):
        with pytest.raises(KeyboardInterrupt):
            fit(start(), loss, failing, SETTINGS, tmp_path, KEY)
        found = fit(start(), loss, noted, SETTINGS, tmp_path, KEY)
        assert asked == list(range(last // 4 * 4, 12))
        jax.tree.map(np.testing.assert_array_equal, found, unbroken[0])
        assert metrics(tmp_path) == unbroken[1]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["12"]
        # A stage that is done is only read back.
        again = fit(start(), loss, lambda step: pytest.fail("it trains"), SETTINGS, tmp_path, KEY)
    jax.tree.map(np.testing.assert_array_equal, again, found)


def test_muon_learns_and_resumes(tmp_path):
    """Muon's matrix update has a fixed size, so a regression converges only to its learning rate."""
    settings = FitSettings(**vars(SETTINGS) | {"muon_rate": 0.1, "steps": 40, "log_every": 1})
    params = {"hidden": {"kernel": start()["kernel"]}, "bias": jnp.zeros(3)}

    def nested(params, inputs, key):
        return loss({"kernel": params["hidden"]["kernel"], "bias": params["bias"]}, inputs, key)

    def failing(step):
        if step == 30:
            raise KeyboardInterrupt
        return batch(step)

    copies = [jax.tree.map(jnp.copy, params) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        fit(copies[0], nested, failing, settings, tmp_path / "a", KEY)
    found = fit(copies[1], nested, batch, settings, tmp_path / "a", KEY)
    expected = fit(copies[2], nested, batch, settings, tmp_path / "b", KEY)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    errors = [line["mse"] for line in metrics(tmp_path / "b")]
    assert np.mean(errors[-5:]) < 0.5 * np.mean(errors[:5])


def test_muon_trains_convolutions_as_matrices_and_first_layers_by_adam(tmp_path):
    """A convolution is the product of its window's pixels and its kernel as a matrix."""
    rng, shape = np.random.default_rng(0), (3, 3, 2, 4)
    target, kernel = rng.normal(size=(2, *shape)).astype(np.float32)

    def trained(layer: str, leaf: str = "kernel", flat: bool = False) -> np.ndarray:
        settings = FitSettings(**vars(SETTINGS) | {"muon_rate": 0.1, "steps": 5})

        def error(params, inputs, key):
            difference = params["encoder"][layer][leaf].reshape(-1, 4) - target.reshape(-1, 4)
            value = jnp.sum((difference * np.linspace(1, 2, 18)[:, None]) ** 2)
            return value, {"loss": value}

        matrix = jnp.asarray(kernel.reshape(-1, 4) if flat else kernel)
        params = {"encoder": {layer: {leaf: matrix}}}
        folder = tmp_path / f"{layer}-{leaf}-{flat}"
        found = fit(params, error, lambda step: np.zeros(8), settings, folder, KEY)
        return np.asarray(found["encoder"][layer][leaf]).reshape(shape)

    hidden, by_adam = trained("conv1"), trained("conv1", leaf="bias")
    np.testing.assert_allclose(hidden, trained("conv1", flat=True), atol=1e-5)
    np.testing.assert_allclose(trained("conv_in"), by_adam, atol=1e-5)
    assert np.abs(hidden - by_adam).max() > 0.01
