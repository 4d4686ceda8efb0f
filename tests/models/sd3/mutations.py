"""Mistakes in Stable Diffusion 3 that its tests catch: see tests/mutations.py."""

MODELS = "digen_jax/models"
NETWORK = "tests/models/sd3/test_network.py::"
FAMILY = "tests/models/sd3/test_family.py::"
VELOCITY = (f"{NETWORK}test_velocity_equals_diffusers",)
PROMPTS = (f"{FAMILY}test_prompts_are_encoded_as_by_the_pipeline",)

# (name, file, old text, new text, tests of which one must fail)
MUTATIONS = (
    (
        "offset of positions", f"{MODELS}/sd3/network.py",
        "top, left = (size - h) // 2, (size - w) // 2",
        "top, left = (size - h) // 2, (size - w) // 2 + 1",
        VELOCITY,
    ),
    (
        "row and column of positions", f"{MODELS}/layers.py",
        "jnp.concatenate([column, row], axis=-1)",
        "jnp.concatenate([row, column], axis=-1)",
        (f"{NETWORK}test_a_fresh_network_has_diffusers_positions_and_no_output",),
    ),
    (
        "layer read", f"{MODELS}/text/clip_text.py",
        "hidden_state: int = -2",
        "hidden_state: int = -1",
        PROMPTS,
    ),
    (
        "side that is padded", f"{MODELS}/sd3/family.py",
        "jnp.pad(context, ((0, 0), (0, 0), (0, missing)))",
        "jnp.pad(context, ((0, 0), (0, 0), (missing, 0)))",
        (f"{FAMILY}test_a_context_narrower_than_the_network_reads_is_padded_as_by_the_pipeline",),
    ),
    (
        "pad token", f"{MODELS}/dual_block.py",
        "weights[-1] = np.log(self.last_counts)",
        "weights[-1] = np.log(self.last_counts + 1)",
        (f"{NETWORK}test_a_biased_null_token_equals_several_zero_tokens",),
    ),
    (
        "norm axis", "digen_jax/attention/head_norms.py",
        "jnp.square(wide).mean(-1, keepdims=True)",
        "jnp.square(wide).mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "modulation order", f"{MODELS}/dual_block.py",
        'scale, shift = self._modulation(1, 2, embedding)',
        'shift, scale = self._modulation(1, 2, embedding)',
        VELOCITY,
    ),
    (
        "modulation order at the end", f"{MODELS}/sd3/network.py",
        'scale, shift = layers.Modulation(2, name="norm_out")(embedding)',
        'shift, scale = layers.Modulation(2, name="norm_out")(embedding)',
        VELOCITY,
    ),
    (
        "shift", f"{MODELS}/sd3/family.py",
        "return make_sigmas(self.scheduler, steps, tokens)",
        'return make_sigmas(self.scheduler, steps, tokens, "uniform")',
        (f"{FAMILY}test_images_are_those_of_the_pipelines_default_call",),
    ),
)  # fmt: skip
