"""Attention for all models: `attend.attend` is the entry point; `kernels` chooses the kernel for a device."""
