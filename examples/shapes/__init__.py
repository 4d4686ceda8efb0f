"""The shapes task: prompts, rendered images, a reward that reads images, and the embedded model's pretraining."""
