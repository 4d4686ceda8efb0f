"""Model folders in diffusers and transformers format, LoRA files, and training checkpoints."""
