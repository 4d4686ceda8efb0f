"""Pretrains the embedded model of moving shapes from scratch: autoencoder, then transformer and text encoder.

python launch/pretrain.py --config configs/moving_shapes_pretrain.py --workdir runs/pretrain \
    --output runs/moving-shapes

Not trained yet. A first autoencoder (no `patch_size`, latents of 8 x 8 with 8 channels, 3000 steps, mse 0.01) blurred
shapes: `shapes_motion` accepted all of 60 rendered held-out clips, and 17% of them after it. With 12,000 steps of a
transformer with 6 layers on its latents, 0.13 of 120 held-out clips were right (guidance 2). This one has as many
numbers in a latent and 1.5 times the parameters.

Measured on two cores with other jobs, which took more than half of them: 0.44 CPU-seconds for a step of the autoencoder
and 1.13 for one of the transformer. Estimated for two free cores: 30 and 80 minutes, two hours in all. On one H100 a
step of the first autoencoder took 0.009 s and one of its transformer 0.008 s.
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
        base_dim=16,
        z_dim=32,
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
        latents_mean=(0.0,) * 32,
        latents_std=(1.0,) * 32,
    )
    transformer = dict(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=32,
        out_channels=32,
        text_dim=64,
        freq_dim=256,
        ffn_dim=512,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        rope_max_seq_len=32,
    )
    first = FitSettings(16_000, learning_rate=2e-3, checkpoint_every=1000)
    second = FitSettings(16_000, learning_rate=1e-3, muon_rate=0.02)
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
        autoencoder=dict(network=autoencoder, batch=8, kl_weight=3e-5, fit=vars(first)),
        transformer=dict(network=transformer, batch=64, caption_dropout=0.1, fit=vars(second)),
    )
    return ConfigDict(config)
