"""Reinforcement learning for flow-matching image and video generators, in JAX."""
