"""How tests compile programs: compilation is most of the tests' work, execution very little."""

import importlib.metadata


def quick_flags(devices: int) -> str:
    """XLA_FLAGS for virtual devices, and for programs that compile quickly and run slowly."""
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # A sixth of the suite's CPU time less; later versions have one kind of emitters, and end at an unknown flag.
    if _jaxlib() < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])


def users_options() -> dict[str, int | bool]:
    """`compiler_options` of jax.jit that undo this: a program as a user's run has it."""
    options: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
    if _jaxlib() < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = True
    return options


def _jaxlib() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
