"""Encoder and decoder of Wan's autoencoders: causal convolutions over clips, channels last.

A causal convolution reads a frame and earlier frames, so a clip can be processed in chunks, each with the last frames
of the previous chunk (see `FrameChunk`). Names follow diffusers' AutoencoderKLWan.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.attention.attend import attend
from digen_jax.attention.kernels import current

Clip = Float[Array, "b t h w c"]
# Square of the epsilon of torch's F.normalize: norms below 1e-12 count as 1e-12.
SMALLEST = 1e-24


class FrameChunk:
    """Chunk of a clip's frames, with the earlier frames that causal convolutions read (diffusers' `feat_cache`).

    The convolutions read and store frames in execution order. A chunk must not outlive its trace.

    Attributes:
      begins: Whether the clip starts with this chunk.
      kept: Last input frames of each causal convolution so far, which the next chunk reads.
    """

    def __init__(self, past: Sequence[Array] | None = None):
        """Takes `kept` of the previous chunk. None means that there is no previous chunk."""
        self.begins = past is None
        self.kept: list[Array] = []
        self._past = iter(past or ())

    def behind_past(
        self, x: Clip, frames: int, start: Float[Array, "b p h w c"] | None = None
    ) -> Float[Array, "b q h w c"]:
        """Prepends the `frames` frames that precede the convolution's input.

        At the start of a clip these are `start`, or zeros.
        """
        if not self.begins:
            start = next(self._past)
        elif start is None:
            start = jnp.zeros((x.shape[0], frames, *x.shape[2:]), x.dtype)
        x = jnp.concatenate([start, x], axis=1)
        self.kept.append(x[:, x.shape[1] - frames :])
        return x


class CausalConv3d(nn.Module):
    """Convolution whose window ends at the output frame.

    Attributes:
      channels: Output channels.
      window: Frames, height, width.
      stride: Stride over frames.
    """

    channels: int
    window: tuple[int, int, int] = (3, 3, 3)
    stride: int = 1

    @nn.compact
    def __call__(
        self, x: Clip, chunk: FrameChunk, start: Float[Array, "b p h w c"] | None = None
    ) -> Float[Array, "b t2 h w d"]:
        """Keeps height and width. A clip is preceded by `start`, of `window - stride` frames, or by zeros."""
        shape = (*self.window, x.shape[-1], self.channels)
        # Frozen parameters may be stored in bfloat16.
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape).astype(x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,))
        alone = chunk.begins and start is None and x.shape[1] == 1
        if self.window[0] > self.stride:
            behind = chunk.behind_past(x, self.window[0] - self.stride, start)
            # Zeros before an image add nothing: a convolution of two dimensions has a third of the products.
            x, kernel = (x, kernel[-1:]) if alone else (behind, kernel)
        if x.shape[1] < kernel.shape[0]:
            return jnp.zeros((x.shape[0], 0, *x.shape[2:4], self.channels), x.dtype)
        sides = [(size // 2, size // 2) for size in self.window[1:]]
        y = conv_of_clip(x, kernel, sides, self.stride)
        return y + bias


def conv_of_clip(
    x: Clip,
    kernel: Float[Array, "k p q c d"],
    sides: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    stride: int = 1,
) -> Float[Array, "b t2 h2 w2 d"]:
    """Convolves frames without padding, with a stride, and height and width with `sides` zeros around them."""
    if kernel.shape[0] > 1 and current().platform == "cpu":
        x, kernel = _stacked_frames(x, kernel, stride)
    if kernel.shape[0] == 1:
        return _conv_of_frames(x, kernel[0], sides)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, 1, 1),
        [(0, 0), *sides],
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )


def _stacked_frames(
    x: Clip, kernel: Float[Array, "k p q c d"], stride: int
) -> tuple[Float[Array, "b t2 h w k*c"], Float[Array, "1 p q k*c d"]]:
    """Returns inputs and kernel of the same convolution within frames: a frame's channels are those of its window.

    On CPUs XLA's convolutions of three dimensions take 5 to 10 times as long.
    """
    frames, *sides, _, channels = kernel.shape
    last = (x.shape[1] - frames) // stride * stride
    parts = [x[:, i : i + last + 1 : stride] for i in range(frames)]
    kernel = jnp.einsum("kpqcd->pqkcd", kernel).reshape(1, *sides, -1, channels)
    return jnp.concatenate(parts, axis=-1), kernel


def _conv_of_frames(
    x: Clip, kernel: Float[Array, "p q c d"], padding: Sequence[tuple[int, int]]
) -> Float[Array, "b t h w d"]:
    frames = x.reshape(-1, *x.shape[2:])
    y = jax.lax.conv_general_dilated(
        frames, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*x.shape[:2], *y.shape[1:])


class RMSNorm(nn.Module):
    """RMS norm of each pixel's channels (arXiv 1910.07467), with a scale.

    Attributes:
      dims: Trailing dimensions of size 1 of the scale in the file.
    """

    dims: int = 3

    @nn.compact
    def __call__(self, x: Clip) -> Clip:
        """Normalizes each pixel to mean square 1, times gamma; zeros stay zeros."""
        channels = x.shape[-1]
        gamma = self.param("gamma", nn.initializers.ones, (channels, *(1,) * self.dims))
        squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        return x * (jax.lax.rsqrt(jnp.maximum(squares, SMALLEST)) * channels**0.5) * gamma.ravel()


class ResidualBlock(nn.Module):
    """Two normed causal convolutions and a residual connection."""

    channels: int

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t h w d"]:
        """Maps activations to `channels` channels."""
        y = nn.silu(RMSNorm(name="norm1")(x))
        y = CausalConv3d(self.channels, name="conv1")(y, chunk)
        y = nn.silu(RMSNorm(name="norm2")(y))
        y = CausalConv3d(self.channels, name="conv2")(y, chunk)
        if x.shape[-1] != self.channels:
            x = CausalConv3d(self.channels, (1, 1, 1), name="conv_shortcut")(x, chunk)
        return x + y


class AttentionBlock(nn.Module):
    """Single-head self-attention over a frame's pixels, with a residual connection."""

    @nn.compact
    def __call__(self, x: Clip) -> Clip:
        """Maps activations to activations of the same shape."""
        b, t, h, w, c = x.shape
        qkv = nn.Conv(3 * c, (1, 1), name="to_qkv")(RMSNorm(2, name="norm")(x))
        q, k, v = jnp.split(qkv.reshape(b * t, h * w, 1, 3 * c), 3, axis=-1)
        y = attend(q, k, v)
        return x + nn.Conv(c, (1, 1), name="proj")(y.reshape(x.shape))


def _after_first(
    x: Clip, chunk: FrameChunk, resample: Callable[[Array, Array | None], Array]
) -> Array:
    """Applies `resample(frames, first)` to all frames except a clip's first, which is unchanged."""
    if not chunk.begins:
        return resample(x, None)
    first = x[:, :1]
    return jnp.concatenate([first, resample(x[:, 1:], first)], axis=1)


class Downsample(nn.Module):
    """Halves height and width, and with `frames` maps clips of 1 + 2 n frames to 1 + n."""

    frames: bool

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 c"]:
        """Downsamples with padding of one at the right and bottom only; later chunks have an even number of frames."""
        c = x.shape[-1]
        x = nn.Conv(c, (3, 3), 2, padding=((0, 1), (0, 1)), name="resample_1")(x)
        if not self.frames:
            return x
        conv = CausalConv3d(c, (3, 1, 1), stride=2, name="time_conv")
        return _after_first(x, chunk, lambda frames, first: conv(frames, chunk, first))


class Upsample(nn.Module):
    """Doubles height and width, and with `frames` maps clips of 1 + n frames to 1 + 2 n.

    Attributes:
      channels: Output channels.
      frames: Whether frames are upsampled, too.
    """

    channels: int
    frames: bool

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 2*h 2*w d"]:
        """Upsamples frames from a convolution's channels, then pixels by nearest neighbor and a convolution."""
        if self.frames:
            conv = CausalConv3d(2 * x.shape[-1], (3, 1, 1), name="time_conv")
            # Before the second frame this convolution reads zeros, not the first frame.
            x = _after_first(x, chunk, lambda frames, _: _two_frames(conv(frames, chunk)))
        b, t, h, w, c = x.shape
        x = jnp.broadcast_to(x[:, :, :, None, :, None], (b, t, h, 2, w, 2, c))
        return nn.Conv(self.channels, (3, 3), padding=1, name="resample_1")(
            x.reshape(b, t, 2 * h, 2 * w, c)
        )


def _two_frames(x: Float[Array, "b t h w d"]) -> Float[Array, "b 2*t h w d//2"]:
    """Splits channels into two frames; the first half is the earlier frame."""
    b, t, h, w, d = x.shape
    pairs = jnp.einsum("bthwsc->btshwc", x.reshape(b, t, h, w, 2, d // 2))
    return pairs.reshape(b, 2 * t, h, w, d // 2)


class MidBlock(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Clip:
        """Maps activations to activations of the same shape."""
        x = ResidualBlock(x.shape[-1], name="resnets_0")(x, chunk)
        x = AttentionBlock(name="attentions_0")(x)
        return ResidualBlock(x.shape[-1], name="resnets_1")(x, chunk)


class UpBlock(nn.Module):
    """Residual blocks of one level, then an upsampling except at the last level.

    Attributes:
      channels: Channels of the blocks.
      blocks: Number of residual blocks.
      frames: Whether frames are upsampled, too. None means no upsampling.
    """

    channels: int
    blocks: int
    frames: bool | None

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps activations to `channels` channels, or half of them after an upsampling."""
        for i in range(self.blocks):
            x = ResidualBlock(self.channels, name=f"resnets_{i}")(x, chunk)
        if self.frames is None:
            return x
        return Upsample(self.channels // 2, self.frames, name="upsamplers_0")(x, chunk)


class ResidualDownBlock(nn.Module):
    """Level of Wan 2.2's encoder: residual blocks and a downsampling, next to which averages of the input are added.

    Attributes:
      channels: Channels of the blocks.
      blocks: Number of residual blocks.
      frames: Whether frames are downsampled, too. None means no downsampling.
    """

    channels: int
    blocks: int
    frames: bool | None

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps activations to `channels` channels."""
        frames, side = _factors(self.frames)
        b, t, h, w, c = x.shape
        # An odd number of frames, at the start of a clip, is preceded by zeros, which count in the mean.
        padded = jnp.pad(x, ((0, 0), (-t % frames, 0), (0, 0), (0, 0), (0, 0)))
        shape = b, -(-t // frames), frames, h // side, side, w // side, side, c
        blocks = jnp.einsum("btfhpwqc->bthwcfpq", padded.reshape(shape))
        mean = blocks.reshape(*blocks.shape[:4], self.channels, -1).mean(-1)
        for i in range(self.blocks):
            x = ResidualBlock(self.channels, name=f"resnets_{i}")(x, chunk)
        if self.frames is not None:
            x = Downsample(self.frames, name="downsampler")(x, chunk)
        return x + mean


class ResidualUpBlock(nn.Module):
    """Level of Wan 2.2's decoder: residual blocks and an upsampling, next to which copies of the input are added.

    The last level has neither upsampling nor copies. The attributes are those of `UpBlock`.
    """

    channels: int
    blocks: int
    frames: bool | None

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps activations to `channels` channels."""
        start, (b, t, h, w, c) = x, x.shape
        for i in range(self.blocks):
            x = ResidualBlock(self.channels, name=f"resnets_{i}")(x, chunk)
        if self.frames is None:
            return x
        frames, side = _factors(self.frames)
        copies = jnp.repeat(start, self.channels * frames * side**2 // c, axis=-1)
        copies = copies.reshape(b, t, h, w, self.channels, frames, side, side)
        copies = jnp.einsum("bthwcfpq->btfhpwqc", copies)
        copies = copies.reshape(b, t * frames, h * side, w * side, self.channels)
        # The first frame of a clip stays one frame.
        copies = copies[:, frames - 1 :] if chunk.begins else copies
        return Upsample(self.channels, self.frames, name="upsampler")(x, chunk) + copies


def _factors(frames: bool | None) -> tuple[int, int]:
    """Returns the factors of frames and of sides of a level; see `UpBlock.frames`."""
    return (2 if frames else 1), (1 if frames is None else 2)


class Encoder3d(nn.Module):
    """Encoder from clips to the moments of latents.

    Attributes:
      widths: Channels of each level.
      blocks: Residual blocks per level.
      downsample: Whether each level but the last also halves frames.
      channels: Output channels.
      residual: Whether the levels are those of Wan 2.2.
    """

    widths: tuple[int, ...]
    blocks: int
    downsample: tuple[bool, ...]
    channels: int
    residual: bool = False

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps frames in [-1, 1] to concatenated means and log variances, before `quant_conv`."""
        x = CausalConv3d(self.widths[0], name="conv_in")(x, chunk)
        layers = 0
        for level, width in enumerate(self.widths):
            if self.residual:
                frames = (*self.downsample, None)[level]
                block = ResidualDownBlock(width, self.blocks, frames, name=f"down_blocks_{level}")
                x = block(x, chunk)
                continue
            for _ in range(self.blocks):
                x = ResidualBlock(width, name=f"down_blocks_{layers}")(x, chunk)
                layers += 1
            if level < len(self.downsample):
                x = Downsample(self.downsample[level], name=f"down_blocks_{layers}")(x, chunk)
                layers += 1
        x = MidBlock(name="mid_block")(x, chunk)
        x = nn.silu(RMSNorm(name="norm_out")(x))
        return CausalConv3d(self.channels, name="conv_out")(x, chunk)


class Decoder3d(nn.Module):
    """Decoder from latents to clips.

    Attributes:
      widths: Channels of each level, lowest resolution first.
      blocks: Residual blocks per level.
      upsample: Whether each level but the last also doubles frames.
      channels: Output channels.
      residual: Whether the levels are those of Wan 2.2.
    """

    widths: tuple[int, ...]
    blocks: int
    upsample: tuple[bool, ...]
    channels: int
    residual: bool = False

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps the output of `post_quant_conv` to frames in [-1, 1], not clipped."""
        x = CausalConv3d(self.widths[0], name="conv_in")(x, chunk)
        x = MidBlock(name="mid_block")(x, chunk)
        block = ResidualUpBlock if self.residual else UpBlock
        for level, (width, frames) in enumerate(
            zip(self.widths, (*self.upsample, None), strict=True)
        ):
            x = block(width, self.blocks, frames, name=f"up_blocks_{level}")(x, chunk)
        x = nn.silu(RMSNorm(name="norm_out")(x))
        return CausalConv3d(self.channels, name="conv_out")(x, chunk)
