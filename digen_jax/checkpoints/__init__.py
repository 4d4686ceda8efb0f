"""Diffusers and transformers folders, LoRA files, and training checkpoints."""
