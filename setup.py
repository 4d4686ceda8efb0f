"""Puts scripts, configs, assets, benchmarks and examples into the installed package.

The rest is in pyproject.toml. `digen_jax/files.py` finds these folders in a checkout and in an installed package.
"""

from setuptools import find_namespace_packages, setup

OUTSIDE = {f"digen_jax.{name}": name for name in ("assets", "configs", "launch")}
IMPORTED = {f"digen_jax.bundled.{name}": name for name in ("benchmarks", "examples.shapes")}
FOLDERS = OUTSIDE | {package: name.replace(".", "/") for package, name in IMPORTED.items()}

setup(
    packages=[*find_namespace_packages(include=["digen_jax*"]), *FOLDERS],
    package_dir=FOLDERS,
)
