"""Mistakes in Z-Image that its tests catch: see tests/mutations.py."""

MODELS = "digen_jax/models"
FAMILY = "tests/models/zimage/test_family.py::"
VELOCITY = ("tests/models/zimage/test_network.py::test_velocity_equals_diffusers",)
PROMPTS = (f"{FAMILY}test_prompts_are_encoded_as_by_the_pipeline",)

# (name, file, old text, new text, tests of which one must fail)
MUTATIONS = (
    (
        "rope offset", f"{MODELS}/zimage/positions.py",
        "jnp.where(filling, 0, lengths[:, None] + 1)",
        "jnp.where(filling, 0, lengths[:, None])",
        VELOCITY,
    ),
    (
        "rope offset of captions", f"{MODELS}/zimage/positions.py",
        "_angles(config, 0, tokens + 1)[1:]",
        "_angles(config, 0, tokens + 1)[:-1]",
        VELOCITY,
    ),
    (
        "rope of what fills up", f"{MODELS}/zimage/positions.py",
        "places = jnp.where(filling, 0,",
        "places = jnp.where(filling, 1,",
        VELOCITY,
    ),
    (
        "template", f"{MODELS}/zimage/family.py",
        "thinking=True",
        "thinking=False",
        PROMPTS,
    ),
    (
        "layer read", f"{MODELS}/zimage/family.py",
        "STATES = (-2,)",
        "STATES = (-1,)",
        PROMPTS,
    ),
    (
        "pad token", f"{MODELS}/zimage/network.py",
        "jnp.where(mask[..., None], x, self._filler(\"cap_pad_token\"))",
        "x + 0 * self._filler(\"cap_pad_token\")",
        VELOCITY,
    ),
    (
        "pad token of images", f"{MODELS}/zimage/network.py",
        'jnp.broadcast_to(self._filler("x_pad_token"), shape)',
        'jnp.broadcast_to(0 * self._filler("x_pad_token"), shape)',
        VELOCITY,
    ),
    (
        "norm axis", f"{MODELS}/zimage/network.py",
        "nn.RMSNorm(epsilon=HEAD_EPSILON, dtype=jnp.float32, name=name)",
        "nn.RMSNorm(epsilon=HEAD_EPSILON, dtype=jnp.float32, name=name, reduction_axes=(-2, -1))",
        VELOCITY,
    ),
    (
        "modulation order", f"{MODELS}/zimage/network.py",
        "scale, gate, mlp_scale, mlp_gate = jnp.split(",
        "gate, scale, mlp_scale, mlp_gate = jnp.split(",
        VELOCITY,
    ),
    (
        "direction of time", f"{MODELS}/zimage/network.py",
        "((1 - sigma) * config.t_scale)",
        "(sigma * config.t_scale)",
        VELOCITY,
    ),
    (
        "scale of guidance", f"{MODELS}/zimage/family.py",
        "v = prompt + (guidance - 1) * (prompt - null)",
        "v = prompt + guidance * (prompt - null)",
        (f"{FAMILY}test_latents_are_the_pipelines_after_each_step_and_so_are_pixels",),
    ),
    (
        "shift", f"{MODELS}/zimage/family.py",
        'spacing="uniform float32"',
        'spacing="timesteps"',
        (f"{FAMILY}test_sigmas_and_timesteps_equal_the_pipelines_to_the_bit",),
    ),
)  # fmt: skip
