"""Pretrains the embedded model of moving shapes from scratch: autoencoder, then transformer and text encoder.

python launch/pretrain.py --config configs/moving_shapes_pretrain.py --workdir runs/pretrain \
    --output runs/moving-shapes

The autoencoder starts with single frames of clips as images. A step of clips takes 0.36 s on two cores of an idle
machine. Shares of rendered held-out clips that the reader accepts after the autoencoder:

| step | mean squared error | accepted |
| --- | --- | --- |
| 2,600 | not measured | 50% of 120 clips |
| 4,000 | 0.0051 | 72.5% of 120 |
| 9,000 | 0.0030 | 98.6% of 360 |
| 11,000 | 0.0027 | 98.6% of 360 |

This run had `fit.steps` 5000 to step 4,000 and 9000 to step 9,000, so that its rate was lower for some of the steps.
Nothing of the transformer is measured with these latents.

Two earlier autoencoders, which started with clips, did not keep the shapes:

| widths, channels of latents | optimizer, clips of a step | steps | CPU-seconds | mse | accepted |
| --- | --- | --- | --- | --- | --- |
| 16, 32, 32; 32 | Adam | 2000 of 8 | 880 | 0.018 | not measured |
| 16, 32, 48; 48 | Muon | 3000 of 4 | 800 | 0.014 | 10% of 60 rendered clips |

The second one stayed at 0.015 for its last 1000 steps, in the first frame, too: colors and motions were right, and
stars and crosses were discs. It has fewer channels before its latents (16 at 8 x 8, 32 at 4 x 4) than in them. The best
linear code of 8 x 8 pixels in 4 frames has an error of 0.011 with 32 numbers, 0.008 with 48 and 0.0066 with 64; of one
frame 0.002 with 64.

12,000 steps of a transformer on the latents of another autoencoder, whose clips were accepted in 17% of cases, reached
0.13 on 120 held-out prompts (guidance 2). 1.13 CPU-seconds for a step of such a transformer were measured.
"""

from ml_collections import ConfigDict

from examples.shapes.fit import FitSettings


def get_config() -> ConfigDict:
    text = dict(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu",
    )
    autoencoder = dict(
        base_dim=32,
        z_dim=64,
        dim_mult=(1, 2, 2),
        num_res_blocks=1,
        attn_scales=(),
        temperal_downsample=(True, True),
        # Squares of 2 x 2 pixels are channels, so that no convolution computes at full size.
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
        # Placeholders: measured on the latents once the autoencoder is trained.
        latents_mean=(0.0,) * 64,
        latents_std=(1.0,) * 64,
    )
    transformer = dict(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=64,
        out_channels=64,
        text_dim=64,
        freq_dim=256,
        ffn_dim=512,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        rope_max_seq_len=32,
    )
    first = FitSettings(11_000, learning_rate=2e-3, muon_rate=0.02)
    second = FitSettings(8000, learning_rate=1e-3, muon_rate=0.02)
    config = dict(
        seed=0,
        pipeline="WanPipeline",
        images=60_000,  # clips
        frames=9,
        image_size=32,
        dtype="float32",
        cpu_devices=1,  # without an accelerator, one device uses all cores
        shift=2.0,  # of the scheduler that the folder ships
        sampling=dict(steps=8, guidance=2.0),  # of the folder's sampling.json
        text=dict(max_length=16, encoder=text),
        autoencoder=dict(
            network=autoencoder,
            image_steps=600,
            image_batch=32,
            batch=4,
            kl_weight=5e-5,
            mae_weight=0.05,
            fit=vars(first),
        ),
        transformer=dict(network=transformer, batch=64, caption_dropout=0.1, fit=vars(second)),
    )
    return ConfigDict(config)
