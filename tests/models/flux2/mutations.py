"""Mistakes in FLUX.2 klein that its tests catch: see tests/mutations.py."""

MODELS = "digen_jax/models"
NETWORK = f"{MODELS}/flux2/network.py"
ROOM = f"{MODELS}/flux2/family.py"
SCHEDULE = f"{MODELS}/flux2/schedule.py"
VAE = f"{MODELS}/autoencoders/autoencoder_flux2.py"
TESTS = "tests/models/flux2/"
VELOCITY = (f"{TESTS}test_network.py::test_velocity_and_gradients_equal_diffusers",)
PROMPTS = (f"{TESTS}test_family.py::test_prompts_are_encoded_as_by_the_pipeline",)
SIGMAS = (f"{TESTS}test_family.py::test_sigmas_and_timesteps_are_the_pipelines",)
PIXELS = (
    f"{TESTS}test_family.py::test_latents_are_the_pipelines_after_each_step_and_so_are_pixels",
)
AUTOENCODER = (
    "tests/models/autoencoders/test_autoencoder_flux2.py::"
    "test_equals_diffusers_forward_and_in_gradients_of_its_input",
)

# (name, file, old text, new text, tests of which one must fail)
MUTATIONS = (
    (
        "rope offset", NETWORK,
        "np.pad(np.arange(tokens)[:, None]",
        "np.pad(np.arange(1, tokens + 1)[:, None]",
        VELOCITY,
    ),
    (
        "rope axis of text", NETWORK,
        "((0, 0), (3, 0))",
        "((0, 0), (0, 3))",
        VELOCITY,
    ),
    (
        "rope axes of the image", NETWORK,
        "np.pad(image_positions(height, width), ((0, 0), (0, 1)))",
        "np.pad(image_positions(height, width), ((0, 0), (1, 0)))",
        VELOCITY,
    ),
    (
        "rope index of the image", NETWORK,
        "image_positions(height, width)",
        "image_positions(height, width, 1)",
        VELOCITY,
    ),
    (
        "rope theta", NETWORK,
        "float(config.rope_theta)",
        "10_000.0",
        VELOCITY,
    ),
    (
        "rope of single blocks", NETWORK,
        "for tables in zip(*rotary, strict=True)",
        "for tables in zip(*rotary[::-1], strict=True)",
        VELOCITY,
    ),
    (
        "scale of time", NETWORK,
        "sigma * layers.NUM_TRAIN_TIMESTEPS, layers.TIME_FEATURES",
        "sigma, layers.TIME_FEATURES",
        VELOCITY,
    ),
    (
        "template", ROOM,
        "thinking=False",
        "thinking=True",
        PROMPTS,
    ),
    (
        "prompt of the pass without one", f"{MODELS}/image_family.py",
        'negative_prompt: ClassVar[str] = ""',
        'negative_prompt: ClassVar[str] = " "',
        PROMPTS,
    ),
    (
        "layer read", ROOM,
        "STATES = (9, 18, 27)",
        "STATES = (8, 17, 26)",
        PROMPTS,
    ),
    (
        "order of the layers", ROOM,
        "STATES = (9, 18, 27)",
        "STATES = (27, 18, 9)",
        PROMPTS,
    ),
    (
        "layers side by side", ROOM,
        "jnp.concatenate(states, axis=-1)",
        "jnp.stack(states, axis=-1).reshape(*states[0].shape[:2], -1)",
        PROMPTS,
    ),
    (
        "pad token", f"{MODELS}/text/tokenizer_files.py",
        'np.asarray(found["input_ids"], np.int32)',
        'np.where(found["attention_mask"], found["input_ids"], 1).astype(np.int32)',
        PROMPTS,
    ),
    (
        "mask of the text encoder", f"{MODELS}/text/language_model.py",
        "lengths = (mask != 0).sum(axis=1).astype(jnp.int32)",
        "lengths = jnp.ones_like(mask, jnp.int32).sum(axis=1)",
        PROMPTS,
    ),
    (
        "norm axis", f"{MODELS}/layers.py",
        "jnp.square(x).mean(-1, keepdims=True)",
        "jnp.square(x).mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "norm axis of heads", "digen_jax/attention/head_norms.py",
        "mean = jnp.square(wide).mean(-1, keepdims=True)",
        "mean = jnp.square(wide).mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "modulation order", NETWORK,
        "shift, scale, gate = modulation",
        "scale, shift, gate = modulation",
        VELOCITY,
    ),
    (
        "modulation order of two streams", NETWORK,
        "x = layers.residual(x, vectors[2], update)",
        "x = layers.residual(x, vectors[5], update)",
        VELOCITY,
    ),
    (
        "modulation order at the end", NETWORK,
        'scale, shift = vectors(2, "norm_out")',
        'shift, scale = vectors(2, "norm_out")',
        VELOCITY,
    ),
    (
        "order of a gate and its value", NETWORK,
        "gate, value = jnp.split(x, 2, axis=-1)",
        "value, gate = jnp.split(x, 2, axis=-1)",
        VELOCITY,
    ),
    (
        "order of what single blocks write", NETWORK,
        "jnp.concatenate([attended, gated(hidden)], axis=-1)",
        "jnp.concatenate([gated(hidden), attended], axis=-1)",
        VELOCITY,
    ),
    (
        "scale of guidance", ROOM,
        "return null + guidance * (prompt - null)",
        "return prompt + guidance * (prompt - null)",
        PIXELS,
    ),
    (
        "shift", ROOM,
        "schedule.sigmas(self.scheduler, steps, h * w)",
        "schedule.sigmas(self.scheduler, steps, h * w // PATCH**2)",
        SIGMAS,
    ),
    (
        "empirical mu", SCHEDULE,
        "mu=empirical_mu(tokens, steps)",
        "image_seq_len=tokens",
        SIGMAS,
    ),
    (
        "empirical mu between few and many steps", SCHEDULE,
        "slope * steps + (many - MANY * slope)",
        "slope * steps + (few - MANY * slope)",
        SIGMAS,
    ),
    (
        "empirical mu of large images", SCHEDULE,
        "if tokens > LARGE:",
        "if tokens >= LARGE:",
        SIGMAS,
    ),
    (
        "tokens of large images", SCHEDULE,
        "LARGE = 4300",
        "LARGE = 4301",
        SIGMAS,
    ),
    (
        "mean of the batch norm", VAE,
        "return latents * jnp.sqrt(self.running_var + self.epsilon) + self.running_mean",
        "return (latents + self.running_mean) * jnp.sqrt(self.running_var + self.epsilon)",
        PIXELS,
    ),
    (
        "variance of the batch norm", VAE,
        "latents * jnp.sqrt(self.running_var + self.epsilon)",
        "latents * (self.running_var + self.epsilon)",
        PIXELS,
    ),
    (
        "epsilon of the batch norm", VAE,
        "LatentStatistics(channels, config.batch_norm_eps)",
        "LatentStatistics(channels, 1e-4)",
        AUTOENCODER,
    ),
    (
        "scaled latents", VAE,
        "(latents - self.running_mean) / jnp.sqrt(self.running_var + self.epsilon)",
        "latents / jnp.sqrt(self.running_var + self.epsilon) - self.running_mean",
        AUTOENCODER,
    ),
    (
        "channels of a patch", VAE,
        'jnp.einsum("bhwcpq->bhpwqc", patches)',
        'jnp.einsum("bhwcqp->bhpwqc", patches)',
        PIXELS,
    ),
)  # fmt: skip
