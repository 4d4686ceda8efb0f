"""Meshes and sharding, and the jitted programs on them: sampler, gradient, trainer. It depends on no model family."""
