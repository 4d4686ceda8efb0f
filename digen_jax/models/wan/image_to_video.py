"""Wan 2.2 I2V-A14B and Wan 2.1 I2V as a family: prompts with images -> conditioning, velocity."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from digen_jax.checkpoints.folder import INDEX, read_model_index
from digen_jax.errors import FieldError, user_input
from digen_jax.files import read_json
from digen_jax.images import read_image, source_images
from digen_jax.models.family import Params, Record, Size
from digen_jax.models.linear import exact_products
from digen_jax.models.vision import clip, preprocess
from digen_jax.models.wan.family import FRAMES_FACTOR, ImageStates, ImageTokens, Wan

PROCESSOR = "image_processor"


@dataclasses.dataclass(frozen=True)
class WanImageToVideo(Wan):
    """Networks of a folder of diffusers' `WanImageToVideoPipeline`; every prompt has an image.

    Without `expand_timesteps` the channels of the network's input are the latents, a mask, which is 1 in the first
    frame, and the latents of a clip that is the image and then gray. Wan 2.1 also reads states of the image in CLIP.

    Attributes:
      image_encoder: CLIP's image encoder. None means that the network does not read its states.
      image_processor: Preprocessing of its images.
    """

    image_encoder: clip.CLIPVisionModel | None = None
    image_processor: preprocess.Processor | None = None

    parts: ClassVar = {**Wan.parts, "image_encoder": clip.VISION}
    optional: ClassVar[tuple[str, ...]] = ("image_encoder", *Wan.optional)
    widths: ClassVar = (
        ("text_encoder", "d_model", "text_dim"),
        ("vae", "z_dim", "out_channels"),
        ("image_encoder", "hidden_size", "image_dim"),
    )
    pipeline: ClassVar[str] = "WanImageToVideoPipeline"
    edits: ClassVar[bool] = True

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if the network's channels or its image encoder do not fit (see `Wan.check_configs`)."""
        super().check_configs(folder, configs, tokens)
        network, latents = configs["transformer"], configs["vae"].z_dim
        expanded = read_model_index(folder).get("expand_timesteps")
        expected = latents if expanded else 2 * latents + FRAMES_FACTOR
        if network.in_channels != expected:
            raise ValueError(
                f"{folder / 'transformer' / 'config.json'}: in_channels must be {expected}, for {latents} channels of "
                f"latents and expand_timesteps {json.dumps(expanded)} in {INDEX}, and is {network.in_channels}"
            )
        if network.image_dim is not None and tokens != cls.default_tokens:
            raise FieldError(
                f"config.model.max_sequence_length must be {cls.default_tokens}, as diffusers' network has it for "
                f"models with an image encoder, not {tokens}"
            )

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizer and, with an image encoder, its image processor."""
        found = super().read_tokenizers(folder, configs, tokens)
        if "image_encoder" not in configs:
            return found
        file = folder / PROCESSOR / "preprocessor_config.json"
        return found | {PROCESSOR: preprocess.Processor.from_config(read_json(file))}

    @property
    def encoders(self) -> Mapping[str, str]:
        """Text encoder, autoencoder and image encoder."""
        found = super().encoders
        return found if self.image_encoder is None else {**found, "image_encoder": PROCESSOR}

    def tokenize(self, records: Sequence[Record]) -> Any:
        """Returns token ids and source images, also cropped for CLIP.

        Raises:
          ValueError: an image is missing or unreadable, or there is no `source`.
        """
        if self.source is None:
            raise ValueError(
                "this model generates clips that start with an image: set config.model.source_height and "
                "config.model.source_width to the size of clips"
            )
        tokens: Any = super().tokenize(records)
        if self.image_processor is None:
            return tokens
        with user_input():
            images = [read_image(source_images(record)[0]) for record in records]
        cropped = [preprocess.crop_image(image, self.image_processor) for image in images]
        return tokens._replace(cropped=np.stack(cropped))

    @exact_products
    def encode(self, params: Params, tokens: ImageTokens) -> Any:
        """Returns the states of text and image, and the latents of the image."""
        found: Any = super().encode(params, tokens)
        if self.image_encoder is None or self.image_processor is None:
            return found
        pixels = preprocess.scaled(jnp.asarray(tokens.cropped), self.image_processor)
        states = self.image_encoder.apply({"params": params["image_encoder"]}, pixels)
        return found._replace(image=states)

    def source_clips(self, images: Float[Array, "b 1 h w 3"]) -> Float[Array, "b t h w 3"]:
        """Returns the images, with gray frames behind them unless the network reads only the first frame."""
        if self.expand_timesteps or self.source is None:
            return images
        rest = (0, 0), (0, self.source.frames - 1), (0, 0), (0, 0), (0, 0)
        return jnp.pad(images, rest, constant_values=0.5)

    @exact_products
    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b t h w c"],
        sigma: Float[Array, "b"],
        conditioning: ImageStates,
        guidance: float | None = None,
    ) -> Float32[Array, "b t h w c"]:
        """Returns the transformer's velocity."""
        if self.expand_timesteps:
            return super().velocity(variables, x, sigma, conditioning, guidance)
        mask = jnp.zeros((*x.shape[:-1], FRAMES_FACTOR), x.dtype).at[:, 0].set(1)
        latents = jnp.concatenate([x, mask, conditioning.source.astype(x.dtype)], axis=-1)
        inputs = self.network_time(sigma), conditioning.context, conditioning.image
        v: Any = self.transformer.apply(variables["transformer"], latents, *inputs)
        return v

    def complete(
        self, latents: Float[Array, "b t h w c"], conditioning: ImageStates
    ) -> Float[Array, "b t h w c"]:
        """Returns the latents, with the image's as the first frame if the network has `expand_timesteps`."""
        return super().complete(latents, conditioning) if self.expand_timesteps else latents

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns FLOPs of the transformer by stream (see `forward_flops` of its module)."""
        config, states = self.transformer.config, 0
        if self.image_encoder is not None:
            vision = self.image_encoder.config
            states = 1 + (vision.image_size // vision.patch_size) ** 2
        arguments = config, self.latent_shape(size), self.context_tokens, states
        return {"transformer": self.parts["transformer"].flops(*arguments)}
