"""Mistakes in Qwen-Image that its tests catch: see tests/mutations.py."""

MODELS = "digen_jax/models"
NETWORK = f"{MODELS}/qwen_image/network.py"
ROOM = f"{MODELS}/qwen_image/family.py"
WAN = f"{MODELS}/autoencoders/autoencoder_wan.py"
TESTS = "tests/models/qwen_image/"
WAN_TESTS = "tests/models/autoencoders/test_autoencoder_wan.py::"
VELOCITY = (f"{TESTS}test_network.py::test_velocity_and_gradients_equal_diffusers",)
ROTARY = (f"{TESTS}test_network.py::test_rotary_tables_are_diffusers_in_published_sizes",)
PROMPTS = (f"{TESTS}test_family.py::test_prompts_are_encoded_as_by_the_pipeline",)
CHAT = (f"{TESTS}test_family.py::test_the_chat_is_the_pipelines",)
NULL = (f"{TESTS}test_family.py::test_the_pass_without_a_prompt_has_the_published_one",)
SIGMAS = (f"{TESTS}test_family.py::test_sigmas_and_timesteps_are_the_pipelines",)
PIXELS = (
    f"{TESTS}test_family.py::test_latents_are_the_pipelines_after_each_step_and_so_are_pixels",
)

# (name, file, old text, new text, tests of which one must fail)
MUTATIONS = (
    (
        "rope offset", NETWORK,
        "first = max(height // 2, width // 2)",
        "first = min(height // 2, width // 2)",
        ROTARY,
    ),
    (
        "rope offset of text by one", NETWORK,
        "np.arange(first, first + text)",
        "np.arange(first + 1, first + 1 + text)",
        VELOCITY,
    ),
    (
        "rope axes of text", NETWORK,
        "of_text = np.repeat(np.arange(first, first + text)[:, None], 3, axis=1)",
        "of_text = np.arange(first, first + text)[:, None] * [1, 1, 0]",
        VELOCITY,
    ),
    (
        "rope middle", NETWORK,
        "[0, height - height // 2, width - width // 2]",
        "[0, height // 2, width // 2]",
        VELOCITY,
    ),
    (
        "rope precision", NETWORK,
        "rotary_table(p, widths, THETA, np.float32)",
        "rotary_table(p, widths, THETA)",
        ROTARY,
    ),
    (
        "scale of time", NETWORK,
        "timestep_features(sigma, layers.TIME_FEATURES, layers.NUM_TRAIN_TIMESTEPS)",
        "timestep_features(sigma, layers.TIME_FEATURES)",
        VELOCITY,
    ),
    (
        "template", ROOM,
        r"<|im_end|>\n<|im_start|>assistant\n",
        r"<|im_end|>\n<|im_start|>assistant",
        PROMPTS,
    ),
    (
        "template's beginning", ROOM,
        r"<|im_start|>system\nDescribe",
        r"<|im_start|>system\n Describe",
        CHAT,
    ),
    (
        "template crop", ROOM,
        "DROPPED = 34",
        "DROPPED = 33",
        PROMPTS,
    ),
    (
        "template crop of the mask", ROOM,
        "jnp.asarray(tokens.mask)[:, DROPPED:]",
        "jnp.asarray(tokens.mask)[:, :-DROPPED]",
        PROMPTS,
    ),
    (
        "template in the number of tokens", ROOM,
        "return DROPPED + self.max_sequence_length",
        "return self.max_sequence_length",
        PROMPTS,
    ),
    (
        "prompt of the pass without one", ROOM,
        'NULL = " "',
        'NULL = ""',
        NULL,
    ),
    (
        "layer read", f"{MODELS}/text/language_model.py",
        'found[done] = _norm(config, dtype, "norm")(x)',
        'found[done] = x + 0 * _norm(config, dtype, "norm")(x)',
        PROMPTS,
    ),
    (
        "pad token", f"{MODELS}/text/tokenizer_files.py",
        'np.asarray(found["attention_mask"], bool)',
        'np.ones_like(found["attention_mask"], bool)',
        PROMPTS,
    ),
    (
        "mask of the text", NETWORK,
        "lengths = x.shape[1] + mask.sum(axis=1).astype(jnp.int32)",
        "lengths = x.shape[1] + jnp.ones_like(mask).sum(axis=1).astype(jnp.int32)",
        VELOCITY,
    ),
    (
        "norm axis", f"{MODELS}/layers.py",
        "jnp.square(x).mean(-1, keepdims=True)",
        "jnp.square(x).mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "norm axis of the text", NETWORK,
        'dtype=jnp.float32, name="txt_norm")',
        'dtype=jnp.float32, name="txt_norm", reduction_axes=(-2, -1))',
        VELOCITY,
    ),
    (
        "norm axis of heads", "digen_jax/attention/head_norms.py",
        "mean = jnp.square(wide).mean(-1, keepdims=True)",
        "mean = jnp.square(wide).mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "norm of the guided velocity", ROOM,
        "of_prompt, of_v = _length(prompt), _length(v)",
        "of_prompt, of_v = _length(null), _length(v)",
        PIXELS,
    ),
    (
        "norm axis of the guided velocity", ROOM,
        "squares = jnp.square(pack(v)).sum(axis=-1, keepdims=True)",
        "squares = jnp.square(pack(v)).sum(axis=(1, 2), keepdims=True) + 0 * pack(v)[..., :1]",
        PIXELS,
    ),
    (
        "scale of guidance", ROOM,
        "v = null + guidance * (prompt - null)",
        "v = prompt + guidance * (prompt - null)",
        PIXELS,
    ),
    (
        "modulation order", f"{MODELS}/dual_block.py",
        "shift, scale, gate, *rest = self._modulation(0, chunks, embedding)",
        "scale, shift, gate, *rest = self._modulation(0, chunks, embedding)",
        VELOCITY,
    ),
    (
        "modulation order of text", f"{MODELS}/dual_block.py",
        "shift, scale, *context_rest = self._modulation(1, 6, embedding)",
        "scale, shift, *context_rest = self._modulation(1, 6, embedding)",
        VELOCITY,
    ),
    (
        "modulation order at the end", NETWORK,
        'scale, shift = layers.Modulation(2, name="norm_out")(embedding)',
        'shift, scale = layers.Modulation(2, name="norm_out")(embedding)',
        VELOCITY,
    ),
    (
        "shift", ROOM,
        "tokens = h * w // SIDE**2",
        "tokens = h * w",
        SIGMAS,
    ),
    (
        "terminal shift", "digen_jax/flow/schedule.py",
        "(remaining[-1] / (1 - config.shift_terminal))",
        "(remaining[-1] / (1 + config.shift_terminal))",
        SIGMAS,
    ),
    (
        "terminal shift before the other", "digen_jax/flow/schedule.py",
        "    if config.use_dynamic_shifting:\n        sigmas = _dynamic_shift(",
        "    if config.shift_terminal:\n"
        "        sigmas = 1 - (1 - sigmas) * (1 - config.shift_terminal) / (1 - sigmas[-1])\n"
        "    if config.use_dynamic_shifting:\n        sigmas = _dynamic_shift(",
        SIGMAS,
    ),
    (
        "mean of latents", WAN,
        "jnp.asarray(config.latents_std) + jnp.asarray(config.latents_mean)",
        "jnp.asarray(config.latents_std) - jnp.asarray(config.latents_mean)",
        PIXELS,
    ),
    (
        "order of mean and deviation of latents", WAN,
        "return latents * jnp.asarray(config.latents_std) + jnp.asarray(config.latents_mean)",
        "return (latents + jnp.asarray(config.latents_mean)) * jnp.asarray(config.latents_std)",
        PIXELS,
    ),
    (
        "scaled latents", WAN,
        "(latents - jnp.asarray(config.latents_mean)) / jnp.asarray(config.latents_std)",
        "latents / jnp.asarray(config.latents_std) - jnp.asarray(config.latents_mean)",
        (f"{WAN_TESTS}test_latents_are_scaled_as_in_the_pipelines",),
    ),
    (
        "published mean of latents", WAN,
        "0.9653, -0.1517, 1.5508)",
        "0.9653, 0.1517, 1.5508)",
        (f"{WAN_TESTS}test_the_real_autoencoder_has_the_tensors_of_diffusers",),
    ),
    (
        "published deviation of latents", WAN,
        "1.6382, 1.1253, 2.8251, 1.9160)",
        "1.6382, 1.1253, 1.9160, 2.8251)",
        (f"{WAN_TESTS}test_the_real_autoencoder_has_the_tensors_of_diffusers",),
    ),
)  # fmt: skip
