"""The same step as an eager loop of torch and diffusers, like public Flow-GRPO code, and a wide random model for it.

`peers.py` runs the loop in a separate process, because training does not import torch.
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from jaxtyping import Float, Float32, Int

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.families import open_pipeline
from digen_jax.models.sd3.family import StableDiffusion3

NUM_TRAIN_TIMESTEPS = 1000
# Width of Stable Diffusion 3.5 Medium: attention heads, and channels of each; and positions in each direction.
HEADS, CHANNELS, POSITIONS = 24, 64, 64


@dataclasses.dataclass(frozen=True)
class EagerWork:
    """Work of a step, as numpy arrays.

    A reverse step of any kind is of_x x + of_v v + std noise. `empty` zero tokens are appended to a context.
    """

    config: TrainConfig
    transformer: pathlib.Path
    latent: tuple[int, ...]  # h, w, c
    sigmas: Float32[np.ndarray, "steps+1"]
    of_x: Float[np.ndarray, "steps"]
    of_v: Float[np.ndarray, "steps"]
    std: Float[np.ndarray, "steps"]
    window: slice  # stored and trained steps
    context: Float32[np.ndarray, "p n d"]
    pooled: Float32[np.ndarray, "p e"]
    null: tuple[np.ndarray, np.ndarray] | None  # context and pooled; None means no guidance
    guidance: float
    rows: Int[np.ndarray, "b"]  # prompt index of each image
    advantages: Float32[np.ndarray, "b"]
    lora: tuple[int, float, tuple[str, ...]] | None  # rank, alpha, torch names of the linear layers
    empty: int
    threads: int
    gpu: bool

    @property
    def bfloat16(self) -> bool:
        """Whether frozen weights and products are bfloat16; trained parameters stay in float32."""
        return self.config.precision.arithmetic == "bfloat16"


class EagerLoop:
    """Sampling and training of a step with diffusers' transformer, on the CPU or a GPU.

    On a GPU float32 products are TF32, as ours, and bfloat16 is autocast's, as in the public codes.
    """

    def __init__(self, work: EagerWork):
        # Imported only by this process.
        import torch
        from diffusers import SD3Transformer2DModel

        torch.set_num_threads(work.threads)
        torch.manual_seed(0)
        self.torch, self.work = torch, work
        torch.set_float32_matmul_precision("high")
        self.device = torch.device("cuda" if work.gpu else "cpu")
        dtype = torch.bfloat16 if work.bfloat16 else torch.float32
        self.model = SD3Transformer2DModel.from_pretrained(work.transformer, torch_dtype=dtype)
        self.model.to(self.device)
        if work.config.model.remat != "none":
            self.model.enable_gradient_checkpointing()
        if work.lora is not None:
            from peft import LoraConfig

            self.model.requires_grad_(False)
            rank, alpha, layers = work.lora
            lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers))
            self.model.add_adapter(lora)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in self.trained:
            parameter.data = parameter.data.float()
        trainer = work.config.trainer
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=trainer.learning_rate,
            betas=(trainer.b1, trainer.b2),
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
        )
        self.conditioning = self._conditioning(work.context, work.pooled, work.empty)
        self.null = self._conditioning(*work.null, work.empty) if work.null else None

    def parameters(self) -> int:
        """Returns the number of trained parameters."""
        return sum(p.numel() for p in self.trained)

    def velocity(
        self,
        x: Float32[np.ndarray, "b h w c"],
        sigma: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
        empty: int,
    ) -> Float32[np.ndarray, "b h w c"]:
        """Returns the guided velocity with `empty` zero tokens appended."""
        torch, work = self.torch, self.work
        conditioning = self._conditioning(work.context, work.pooled, empty)
        null = self._conditioning(*work.null, empty) if work.null else None
        with torch.inference_mode():
            x = self._tensor(x).permute(0, 3, 1, 2).contiguous()
            sigma, rows = self._tensor(sigma), self._tensor(rows).long()
            v = self._velocity(x, sigma, rows, conditioning, null)
            return v.permute(0, 2, 3, 1).cpu().numpy()

    def sample(self) -> None:
        """Samples a step's images and keeps their transitions."""
        rows, size = self._tensor(self.work.rows).long(), self.work.config.sampler.chunk
        with self.torch.inference_mode():
            chunks = [self._sample_chunk(rows[i : i + size]) for i in range(0, len(rows), size)]
        self.chunks = chunks
        self._synchronize()

    def train(self) -> None:
        """Computes the gradient of all transitions, pass by pass, and updates."""
        torch, work = self.torch, self.work
        transitions = len(work.rows) * (work.window.stop - work.window.start)
        self.optimizer.zero_grad(set_to_none=True)
        for steps, rows, x, x_next, old, advantages in self._passes():
            new = self._log_prob(steps, x, x_next, self._guided(x, steps, rows))
            ratio = torch.exp(new - old)
            clip = cast(Any, work.config.algorithm).clip_range
            clipped = ratio.clamp(1 - clip, 1 + clip)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)
            (loss.sum() / transitions).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, work.config.trainer.clip_norm)
        self.optimizer.step()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.work.gpu:
            self.torch.cuda.synchronize()

    def _tensor(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(np.array(array)).to(self.device)

    def _conditioning(self, context: np.ndarray, pooled: np.ndarray, empty: int) -> tuple[Any, Any]:
        context = np.pad(context, ((0, 0), (0, empty), (0, 0)))
        return self._tensor(context), self._tensor(pooled)

    def _guided(self, x: Any, steps: Any, rows: Any) -> Any:
        sigma = self._tensor(self.work.sigmas)[steps]
        return self._velocity(x, sigma, rows, self.conditioning, self.null)

    def _velocity(self, x: Any, sigma: Any, rows: Any, conditioning: Any, null: Any) -> Any:
        torch, work = self.torch, self.work
        context, pooled = (c[rows] for c in conditioning)
        if null is not None:
            x, sigma = x.repeat(2, 1, 1, 1), sigma.repeat(2)
            context, pooled = (
                torch.cat([n.expand(len(rows), *n.shape[1:]), c])
                for n, c in zip(null, (context, pooled), strict=True)
            )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=work.bfloat16):
            v = self.model(x, context, pooled, sigma * NUM_TRAIN_TIMESTEPS, return_dict=False)[0]
        v = v.float()
        if null is None:
            return v
        without, prompt = v.chunk(2)
        return without + work.guidance * (prompt - without)

    def _sample_chunk(self, rows: Any) -> tuple[Any, ...]:
        """Returns (rows, x, x_next, log-probabilities) of the window's transitions of a chunk, [s, b, ...]."""
        torch, work = self.torch, self.work
        h, w, c = work.latent
        x, kept = torch.randn(len(rows), c, h, w, device=self.device), []
        for i in range(len(work.std)):
            steps = torch.full((len(rows),), i, device=self.device)
            v = self._guided(x, steps, rows)
            mean = float(work.of_x[i]) * x + float(work.of_v[i]) * v
            x_next = mean + float(work.std[i]) * torch.randn_like(x) if work.std[i] else mean
            if work.window.start <= i < work.window.stop:
                kept.append((x, x_next, self._log_prob(steps, x, x_next, v)))
            x = x_next
        return rows, *(torch.stack(each) for each in zip(*kept, strict=True))

    def _log_prob(self, steps: Any, x: Any, x_next: Any, v: Any) -> Any:
        """Returns the Gaussian log-density without its normalizer, averaged over each image."""
        of_x, of_v, std = (
            self._tensor(a.astype(np.float32))[steps][:, None, None, None]
            for a in (self.work.of_x, self.work.of_v, self.work.std)
        )
        square = (x_next - of_x * x - of_v * v) ** 2 / (2 * std**2)
        return -square.mean((1, 2, 3))

    def _passes(self) -> Iterator[tuple[Any, ...]]:
        """Yields (steps, rows, x, x_next, old log-probabilities, advantages) per pass: `pack` steps of some images."""
        torch, trainer = self.torch, self.work.config.trainer
        advantages = self._tensor(self.work.advantages)
        first = self.work.window.start
        for rows, x, x_next, old in self.chunks:
            for i in range(0, len(x), trainer.pack):
                for j in range(0, len(rows), trainer.micro_batch):
                    at = slice(i, i + trainer.pack), slice(j, j + trainer.micro_batch)
                    taken = [a[at].flatten(0, 1).clone() for a in (x, x_next, old)]
                    count, images = len(x[at[0]]), rows[at[1]]
                    steps = torch.arange(first + i, first + i + count, device=self.device)
                    steps = steps.repeat_interleave(len(images))
                    yield steps, images.repeat(count), *taken, advantages[at[1]].repeat(count)


@contextlib.contextmanager
def with_wide_model(config: TrainConfig, layers: int) -> Iterator[TrainConfig]:
    """Yields a config for such a model and removes its folder afterwards; with 0 layers, yields it unchanged."""
    if layers < 0:
        raise ConfigError(f"--wide must not be below 0, but is {layers}")
    if not layers:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        source = open_pipeline(config.model.folder, config.model.without)
        write_wide(pathlib.Path(folder), source, layers)
        yield dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def write_wide(
    folder: pathlib.Path,
    source: pathlib.Path,
    layers: int,
    heads: int = HEADS,
    channels: int = CHANNELS,
) -> None:
    """Writes the folder of a pipeline whose other components are those of `source`.

    The transformer has torch's random initialization. The first half of the layers has a second attention, as in
    Stable Diffusion 3.5 Medium; the default number and channels of the heads are also the same.
    """
    import torch
    from diffusers import SD3Transformer2DModel

    source = source.resolve()
    for name in ("model_index.json", *StableDiffusion3.classes()):
        if name != "transformer" and (source / name).exists():
            (folder / name).symlink_to(source / name)
    config = json.loads((source / "transformer" / "config.json").read_text()) | {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": channels,
        "caption_projection_dim": heads * channels,
        "dual_attention_layers": list(range(layers // 2)),
        "qk_norm": "rms_norm",
        "pos_embed_max_size": POSITIONS,
    }
    torch.manual_seed(0)
    model = SD3Transformer2DModel.from_config(config)
    model.save_pretrained(folder / "transformer", max_shard_size="100GB")
