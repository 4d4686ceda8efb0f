"""Attention for all models: `attend.attend` is the entry point; `kernels` chooses the kernel for a device.

The sampler and the trainer enter `kernels.on_mesh` while tracing a network, which tells attention the target devices
and how arrays are sharded over them.
"""
