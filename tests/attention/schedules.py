"""The compiler's schedule of packed attention: instruction words of a step of each kernel, as JSON.

python -m tests.attention.schedules v5p:2x2x1 64 1152 norms

The TPU compiler reads from the environment where it writes schedules when it starts, so this is a process of its own.
"""

import json
import os
import pathlib
import re
import sys
import tempfile

FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
WORD = re.compile(r"^ *(0x[0-9a-f]+|0) +[A-Z: >]*: ", re.MULTILINE)


def words(topology: str, width: int, tokens: int, normed: bool, folder: str) -> dict[str, int]:
    """Compiles the gradient for one device; the compiler writes its schedules into the folder."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from digen_jax.attention import packed
    from digen_jax.attention.attend import HeadNorms
    from digen_jax.planning.hardware import topology_devices

    place = SingleDeviceSharding(topology_devices(topology)[0])
    heads = 2 * packed.LANES // width
    stream = jax.ShapeDtypeStruct((1, tokens, heads, width), jnp.bfloat16, sharding=place)
    scale = jax.ShapeDtypeStruct((width,), jnp.float32, sharding=place)

    def loss(q, k, v, scale):
        norms = HeadNorms([scale], [scale]) if normed else None
        return packed.attend((q,), (k,), (v,), norms=norms)[0].astype(jnp.float32).sum()

    jax.jit(jax.grad(loss, (0, 1, 2))).lower(stream, stream, stream, scale).compile()
    found = {}
    for direction in ("forward", "backward"):
        (path,) = pathlib.Path(folder).glob(f"*attention_{direction}_*[0-9]-final_bundles.txt")
        found[direction] = len(WORD.findall(path.read_text()))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} {FLAGS}"
        _, topology, width, tokens, *rest = sys.argv
        print(json.dumps(words(topology, int(width), int(tokens), rest == ["norms"], folder)))
