"""Process setup and shutdown: devices, compile cache, `jax.distributed`, signals, terminal output."""
