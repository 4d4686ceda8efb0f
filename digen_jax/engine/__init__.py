"""Meshes and sharding, and the jitted programs on them: sampler, gradient, trainer. It knows no model family."""
