"""Puts launch scripts, configs and assets into the installed package; all else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

OUTSIDE = {f"digen_jax.{name}": name for name in ("assets", "configs", "launch")}

setup(
    packages=[*find_namespace_packages(include=["digen_jax*"]), *OUTSIDE],
    package_dir=OUTSIDE,
)
