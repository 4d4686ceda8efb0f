"""The shapes task: prompts, rendered images, a reward that reads images, and pretraining of the embedded model."""
