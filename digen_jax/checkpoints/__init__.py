"""Parameters in and out: diffusers and transformers folders, LoRA in the PEFT/diffusers format."""
