"""Attention for every model: `attend.attend` is the one function, `kernels` says what computes it where.

Models call `attend`; sampler and trainer enter `target.on_mesh` while they trace a network, so that attention knows the
devices that the program is for and how its arrays are split over them.
"""
