"""Rewards that are networks: scores of CLIPs, in Flax.

Each module has `load`, which reads published files into a `Scorer` and its parameters, and `make`, which makes of them
a reward `f(images, prompts, metadata) -> scores` for the host. `Scorer.score` is a pure function of parameters, images
and token ids, so that it can also be jitted on a mesh whose devices have the images.
"""
