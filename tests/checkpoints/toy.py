"""A small network in linen and in torch: convolution, embedding, norm, list, scanned list."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

LISTS = ("blocks", "to_out")
IMAGE = (2, 5, 6, 3)
RUNS = {False: {"0to2": 3, "3": 1}, True: {"0to1": 2, "2to3": 2}}

# A tiny SD3.5 with all three segments (0to1, 2to3, 4), and what a pipeline may be without.
SD3 = dict(sample_size=16, in_channels=4, out_channels=4, num_layers=5, attention_head_dim=8)
SD3 |= dict(num_attention_heads=4, joint_attention_dim=12, caption_projection_dim=32)
SD3 |= dict(pooled_projection_dim=10, pos_embed_max_size=12, dual_attention_layers=(0, 1))
SD3 |= dict(qk_norm="rms_norm")
ENCODERS = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")}


class Block(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        y = nn.Dense(12, dtype=self.dtype, name="to_in")(y)
        return x + nn.Dense(8, dtype=self.dtype, name="to_out_0")(nn.tanh(y)), None


class Toy(nn.Module):
    """Blocks 0..2 scanned and rematerialised, block 3 apart; with `cut` scans of 0..1 and 2..3."""

    dtype: jnp.dtype | None = None
    cut: bool = False

    @nn.compact
    def __call__(self, images, ids):
        x = nn.Conv(8, (3, 2), padding="VALID", name="proj")(images)
        x = x + nn.Embed(7, 8, name="embed")(ids)[:, None, None]
        x = nn.Dense(8, dtype=self.dtype, name="linear_1")(x)
        for name, length in RUNS[self.cut].items():
            x = self._blocks(name, length)(x, None)[0]
        return x

    def _blocks(self, name, length):
        block = nn.remat(Block, prevent_cse=False)
        if length > 1:
            axes = {"params": 0, "lora": 0}
            block = nn.scan(
                block, axes, split_rngs={"params": True}, in_axes=nn.broadcast, length=length
            )
        return block(self.dtype, name=f"blocks_{name}")


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.to_in = torch.nn.Linear(8, 12)
        self.to_out = torch.nn.ModuleList([torch.nn.Linear(12, 8)])

    def forward(self, x):
        return x + self.to_out[0](torch.tanh(self.to_in(self.norm(x))))


class TorchToy(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.proj = torch.nn.Conv2d(3, 8, (3, 2))
        self.embed = torch.nn.Embedding(7, 8)
        self.linear_1 = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(4))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, images, ids):
        x = self.proj(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.linear_1(x + self.embed(ids)[:, None, None])
        for block in self.blocks:
            x = block(x)
        return x


def inputs():
    images = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    return images, np.array([4, 1], np.int32)


def template(cut=False):
    return jax.eval_shape(Toy(cut=cut).init, jax.random.key(0), *inputs())["params"]


def torch_output(module):
    with torch.no_grad():
        return module(*(torch.tensor(array) for array in inputs())).numpy()


def output(params):
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(Toy().apply)({"params": params}, *inputs()))
