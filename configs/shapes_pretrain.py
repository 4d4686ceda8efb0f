"""Pretrains the embedded shapes model from scratch: autoencoder, then transformer and text encoders.

python launch/pretrain.py --config configs/shapes_pretrain.py --workdir runs/pretrain --output assets/shapes-sd3

Expected on 2 CPU cores: autoencoder 14 minutes, mse 0.0012; transformer 75 minutes, loss 0.22. The run that produced
the embedded model started with 12,000 transformer steps; at step 6000 this was increased to 16,000, which stretched the
rest of the learning rate's cosine.
"""

from ml_collections import ConfigDict

from examples.shapes.fit import FitSettings


def get_config() -> ConfigDict:
    text = dict(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=64,
        hidden_act="quick_gelu",
    )
    autoencoder = dict(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        # Placeholders: measured on the latents once the autoencoder is trained.
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    transformer = dict(
        sample_size=8,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=16,
        dual_attention_layers=(),
        qk_norm="rms_norm",
    )
    first = FitSettings(3000, learning_rate=3e-3, final_rate=0.1, warmup=100, ema=0.995)
    second = FitSettings(16_000, learning_rate=1e-3, muon_rate=0.02)
    config = dict(
        seed=0,
        pipeline="StableDiffusion3Pipeline",
        images=120_000,
        frames=1,
        image_size=32,
        dtype="float32",
        cpu_devices=1,  # without an accelerator, one device uses all cores
        shift=1.0,  # of the scheduler that the folder ships
        text=dict(max_length=12, encoder=text),
        autoencoder=dict(
            network=autoencoder, batch=32, kl_weight=1e-4, mae_weight=0.5, fit=vars(first)
        ),
        transformer=dict(network=transformer, batch=64, caption_dropout=0.1, fit=vars(second)),
    )
    return ConfigDict(config)
