"""Rewards that are networks: scores of CLIPs, in Flax.

Each module has `opened`, which opens published files as a scorer with the shapes of its parameters, `load`, which
also reads these, and `make`, which makes a reward `f(images, prompts, metadata) -> scores` on one device of them. A run
has them on its sampling meshes (`on_mesh`): both are an `parallel.reward_model.RewardModel`, of one device or of many.
"""
