"""Mistakes in FLUX.1 and FLUX.1 Kontext that their tests catch: see tests/mutations.py."""

MODELS = "digen_jax/models"
FAMILY = "tests/models/flux/test_family.py::"
VELOCITY = ("tests/models/flux/test_network.py::test_velocity_and_gradients_equal_diffusers",)
PROMPTS = (f"{FAMILY}test_prompts_are_encoded_as_by_the_pipeline",)
EDITED_VELOCITY = (
    "tests/models/flux/test_kontext_network.py::test_velocity_and_gradients_equal_diffusers",
)
KONTEXT = "tests/models/flux/test_kontext.py::"
TWO_PASSES = "test_latents_are_the_pipelines_after_each_step_and_so_are_pixels"
PICTURES = (f"{KONTEXT}test_pictures_are_encoded_as_by_the_pipeline",)
PICTURE_SIZES = (f"{KONTEXT}test_pictures_get_the_size_that_the_pipeline_chooses",)

# (name, file, old text, new text, tests of which one must fail)
MUTATIONS = (
    (
        "rope offset", f"{MODELS}/flux/network.py",
        "self._rotary(np.zeros((context.shape[1], 3), int))",
        "self._rotary(np.ones((context.shape[1], 3), int))",
        VELOCITY,
    ),
    (
        "rope axes", f"{MODELS}/rotary.py",
        "np.stack([np.full_like(rows, index), rows, columns], axis=-1)",
        "np.stack([np.full_like(rows, index), columns, rows], axis=-1)",
        VELOCITY,
    ),
    (
        "rope direction", f"{MODELS}/rotary.py",
        "np.where(np.arange(angles.shape[1]) % 2, 1, -1)",
        "np.where(np.arange(angles.shape[1]) % 2, -1, 1)",
        VELOCITY,
    ),
    (
        "token read", f"{MODELS}/text/clip_text.py",
        "return jnp.argmax(ids == eos_token_id, axis=-1)",
        "return jnp.argmax(ids == eos_token_id, axis=-1) - 1",
        PROMPTS,
    ),
    (
        "layer read", f"{MODELS}/text/clip_text.py",
        "transformer(ids, self.config.num_hidden_layers)[1]",
        "transformer(ids, self.config.num_hidden_layers)[0][:, 0]",
        PROMPTS,
    ),
    (
        "pad token", f"{MODELS}/text/tokenizer_files.py",
        'np.asarray(found["input_ids"], np.int32)',
        'np.where(found["attention_mask"], found["input_ids"], 1).astype(np.int32)',
        PROMPTS,
    ),
    (
        "norm axis", f"{MODELS}/layers.py",
        "x = x - x.mean(-1, keepdims=True)",
        "x = x - x.mean((-2, -1), keepdims=True)",
        VELOCITY,
    ),
    (
        "modulation order", f"{MODELS}/flux/network.py",
        'shift, scale, gate = layers.Modulation(3, name="norm")(embedding)',
        'scale, shift, gate = layers.Modulation(3, name="norm")(embedding)',
        VELOCITY,
    ),
    (
        "modulation order of two streams", f"{MODELS}/dual_block.py",
        'shift, scale, gate, *rest = self._modulation(0, chunks, embedding)',
        'scale, shift, gate, *rest = self._modulation(0, chunks, embedding)',
        VELOCITY,
    ),
    (
        "modulation order at the end", f"{MODELS}/flux/network.py",
        'scale, shift = layers.Modulation(2, name="norm_out")(embedding)',
        'shift, scale = layers.Modulation(2, name="norm_out")(embedding)',
        VELOCITY,
    ),
    (
        "scale of guidance", f"{MODELS}/layers.py",
        'embedding = embedding + embed(guidance, "guidance_embedder")',
        'embedding = embedding + embed(guidance / NUM_TRAIN_TIMESTEPS, "guidance_embedder")',
        VELOCITY,
    ),
    (
        "shift", f"{MODELS}/flux/family.py",
        "tokens = h * w // SIDE**2",
        "tokens = h * w",
        (f"{FAMILY}test_sigmas_and_timesteps_are_the_pipelines",),
    ),
    (
        "Kontext: rope index of the picture", f"{MODELS}/flux/network.py",
        "picture.shape[1:3]), index)",
        "picture.shape[1:3]), 0)",
        EDITED_VELOCITY,
    ),
    (
        "Kontext: tokens that are the image", f"{MODELS}/flux/network.py",
        "self._velocity(tokens[:, :own], embedding, height, width)",
        "self._velocity(tokens[:, x.shape[1] - own : x.shape[1]], embedding, height, width)",
        EDITED_VELOCITY,
    ),
    (
        "Kontext: mode of the posterior", f"{MODELS}/autoencoders/autoencoder_kl.py",
        'mean, _ = vae.apply({"params": params}, images * 2 - 1, method="encode")',
        'mean, logvar = vae.apply({"params": params}, images * 2 - 1, method="encode")\n'
        "    mean = mean + jnp.exp(logvar / 2)",
        PICTURES,
    ),
    (
        "Kontext: range of pictures", f"{MODELS}/autoencoders/autoencoder_kl.py",
        "images * 2 - 1",
        "images",
        PICTURES,
    ),
    (
        "Kontext: scale of the picture's latents", f"{MODELS}/autoencoders/autoencoder_kl.py",
        "return scale_latents(vae.config, mean)",
        "return mean",
        PICTURES,
    ),
    (
        "Kontext: filter", "digen_jax/images.py",
        "Image.Resampling.LANCZOS",
        "Image.Resampling.BICUBIC",
        PICTURES,
    ),
    (
        "Kontext: preferred sizes", f"{MODELS}/flux/kontext.py",
        "(1456, 720), (1392, 752)",
        "(1456, 736), (1392, 752)",
        PICTURE_SIZES,
    ),
    (
        "Kontext: preferred size of a shape", f"{MODELS}/flux/kontext.py",
        "ratio = width // multiple / max(1, height // multiple)",
        "ratio = width / height",
        PICTURE_SIZES,
    ),
    (
        "Kontext: preferred size by the logarithm", f"{MODELS}/flux/kontext.py",
        "abs(ratio - size.width / size.height)",
        "abs(np.log(max(ratio, 1e-9) * size.height / size.width))",
        PICTURE_SIZES,
    ),
    (
        "Kontext: picture of the null prompt", f"{MODELS}/flux/kontext.py",
        '{**record, "prompt": negative_of(self, record)} for record in records',
        '{**records[0], "prompt": negative_of(self, record)} for record in records',
        (f"{KONTEXT}test_the_null_conditioning_keeps_the_picture",),
    ),
    (
        "Kontext: negative prompt", f"{MODELS}/flux/kontext.py",
        '"prompt": negative_of(self, record)',
        '"prompt": ""',
        (f"{KONTEXT}{TWO_PASSES}",),
    ),
    (
        "negative prompt", f"{MODELS}/family.py",
        'return record.get("negative_prompt", family.negative_prompt)',
        "return family.negative_prompt",
        (f"{FAMILY}{TWO_PASSES}",),
    ),
    (
        "true guidance from the prompt", f"{MODELS}/flux/family.py",
        "return null + guidance * (prompt - null)",
        "return prompt + guidance * (prompt - null)",
        (f"{FAMILY}{TWO_PASSES}",),
    ),
    (
        "second pass with the scale as its number", "digen_jax/engine/policy.py",
        "v = self.family.velocity(variables, *both, pairs, embedded)",
        "v = self.family.velocity(variables, *both, pairs, scale)",
        (f"{FAMILY}{TWO_PASSES}",),
    ),
    (
        "nulls without a second pass", "digen_jax/engine/policy.py",
        'kind == "both" and self.true_guidance > 1',
        'kind == "both"',
        (f"{FAMILY}{TWO_PASSES}",),
    ),
)  # fmt: skip
