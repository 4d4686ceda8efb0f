"""Eight virtual CPU devices and a shared compile cache for every test."""

import gc
import os
import pathlib

import pytest

from tests.compiling import quick_flags, users_options

ROOT = pathlib.Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "xla"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are not optimised, unless a test requires it (`optimised`).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick_flags(devices=8)}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")
# Programs without the lines of Python that made each operation are lowered in less time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny networks gain nothing by torch's threads, and on busy cores these wait for one another for seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Checks the shape annotations of formulas and programs, except in the slow tests, which trace more often."""
    if config.option.markexpr.startswith("slow"):
        return
    from jaxtyping import install_import_hook

    # Networks are compared with diffusers; checking everything would be a sixth of the set's time.
    packages = [
        ROOT / "digen_jax" / name for name in ("algorithms", "attention", "parallel", "diffusion")
    ]
    files = [file for package in packages for file in package.glob("*.py")]
    annotated = [file for file in files if "jaxtyping" in file.read_text()]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in annotated]
    install_import_hook([one.removesuffix(".__init__") for one in names], "beartype.beartype")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of data that is made once for all tests and shared by their processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module")
def exact_and_split():
    """Float32 stays float32 in every product, and small parameters are sharded like large ones.

    A rollout that moves to a mesh has the programs of the last one that moved there.
    """
    import jax

    from digen_jax.parallel import system

    sampler, made = system.Sampler, {}

    def moved(policy, group, *others):
        kept = policy, group.layout, *others
        key = group.mesh, group.attention, *map(id, kept)
        if key not in made:  # with what has the ids, so that nothing else gets them
            made[key] = kept, sampler(policy, group, *others)
        return made[key][1]

    # Not by the context manager of the same name, which other threads would not see.
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 16)
        patch.setattr(system, "Sampler", moved)
        yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture(scope="module")
def optimised():
    """Programs are compiled as in a user's run: fused sums round differently in every program."""
    import jax

    compiled = jax.jit

    def jit(*args, compiler_options=None, **options):
        return compiled(
            *args, compiler_options=users_options() | (compiler_options or {}), **options
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


def pytest_collection_finish():
    """What is imported stays, and traced programs are many objects: by default 8% of test_sample's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


# The files that take longest, which come first: a file's tests run in one process.
LONGEST = (
    "distributed/test_launch.py",
    "distributed/test_nodes.py",
    "test_notebooks.py",
    "parallel/test_axes.py",
    "data/test_precompute.py",
    "planning/test_memory.py",
    "planning/test_estimate.py",
    "examples/test_pretrain.py",
    "run/test_hosts.py",
)


def pytest_collection_modifyitems(items):
    """Sorts the longest files first, then whole runs, so that all test processes end at the same time."""
    longest = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    whole_runs = ROOT / "tests", ROOT / "tests" / "run"
    items.sort(
        key=lambda item: (longest.get(item.path, len(longest)), item.path.parent not in whole_runs)
    )
