"""Programs as text: parts, trips of loops and matrix products, by hand and against the compiler."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from digen_jax.planning.counting import products
from digen_jax.planning.hlo import Array, parse
from digen_jax.planning.layers import layer_of, module_of
from digen_jax.planning.loops import Frame, trips

PROGRAMS = pathlib.Path(__file__).parent / "programs"

# As the TPU compiler writes loops: no count; start, limit and step are constants, some of them outside.
LOOPS = (PROGRAMS / "loops.txt").read_text()


def loop_of(module, computation, caller=None, call=None):
    frame = Frame(module.computations[computation], caller, call)
    (loop,) = [i for i in frame.computation.instructions.values() if i.opcode == "while"]
    return frame, loop


def test_trips_of_nested_loops_follow_from_constants():
    module = parse(LOOPS)
    frame, outer = loop_of(module, "main")
    assert trips(module, frame, outer) == 3  # 3, 2, 1
    inside, inner = loop_of(module, "outer_body", frame, outer)
    assert trips(module, inside, inner) == 4  # 0, 2, 4, 6
    assert products(module) == 3 * 4 * 2 * 8**3


@pytest.mark.parametrize(
    ("direction", "limit", "count"), [("LT", 7, 4), ("LE", 8, 5), ("NE", 8, 4), ("LT", 0, 0)]
)
def test_every_comparison(direction, limit, count):
    text = LOOPS.replace("%limit.1), direction=LT", f"%limit.1), direction={direction}")
    module = parse(text.replace("constant(7)", f"constant({limit})"))
    frame, outer = loop_of(module, "main")
    inside, inner = loop_of(module, "outer_body", frame, outer)
    assert trips(module, inside, inner) == count


def test_a_loop_that_depends_on_data_does_not_tell():
    old = "%t.6 = (s32[], f32[8,8]{1,0}, s32[]) tuple("
    new = f"%read = s32[] custom-call(%x)\n  {old}%read"
    module = parse(LOOPS.replace(f"{old}%three", new))
    assert trips(module, *loop_of(module, "main")) is None
    with pytest.raises(ValueError, match="does not tell how often"):
        products(module)


KERNEL = (PROGRAMS / "kernel.txt").read_text()


def test_an_instruction_may_span_lines_and_have_results_of_any_type():
    entry = parse(KERNEL).computations["main"]
    wide = entry.instructions["wide"]
    assert [i.opcode for i in entry.operands(wide)] == ["parameter"]
    assert wide.arrays == (
        Array("f32", (2,)),
        Array("s8", (3,)),
        Array("u4", (5,)),
        Array("pred", ()),
    )
    assert wide.bytes == 8 + 3 + 3 + 1
    assert (wide.cycles, wide.op_name) == (14844, "jit(g)/kernel(a)/x")
    assert entry.root.name == "r" and entry.parameters[0].name == "q"


def test_text_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no program"):
        parse("<html>")
    with pytest.raises(ValueError, match="unknown type, f128"):
        Array("f128", (2,)).bytes  # noqa: B018


def scanned(blocks, rounds):
    """A product in a loop in a loop, its gradient, and one more product."""

    def f(w, x):
        def block(x, w):
            return jnp.tanh(x @ w), None

        def again(x, _):
            return jax.checkpoint(lambda x: jax.lax.scan(block, x, w)[0])(x), None

        return (jax.lax.scan(again, x, length=rounds)[0] ** 2).sum()

    shapes = (blocks, 64, 64), (32, 64)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(jax.grad(f)).lower(*given)


def test_products_in_real_loops():
    """Forward, again in the backward pass (rematerialised), and two products backward."""
    flops = products(parse(scanned(5, 3).compile().as_text()))
    assert flops == 5 * 3 * 4 * 2 * 32 * 64 * 64


def test_products_without_loops_are_those_that_the_compiler_counts():
    """Batched, strided, dilated and grouped; elementwise operations are few."""

    def f(x, y, kernel):
        z = jnp.einsum("bqhd,bkhd->bhqk", x, y)
        image = z[..., None] * jnp.ones(16)
        maps = jax.lax.conv_general_dilated(
            image.reshape(-1, 48, 48, 16), kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        back = jax.lax.conv_transpose(maps, kernel, (2, 2), "SAME")
        return jax.lax.conv_general_dilated(
            back, kernel[..., :2, :], (1, 1), "SAME", rhs_dilation=(2, 2), feature_group_count=8,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    shapes = (2, 48, 4, 64), (2, 48, 4, 64), (3, 3, 16, 16)
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    counted = compiled.cost_analysis()["flops"]
    assert products(parse(compiled.as_text())) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(f)/jvp(Net)/while/body/closed_call/blocks/to_q/dot_general", "blocks/to_q/dot_general"),
        ("jit(f)/transpose(jvp(Net))/while/body/blocks/ff/net_2/dot_general", "blocks/ff/net_2/dot_general (backward)"),
        ("jit(f)/transpose(jvp(a/b))/checkpoint/rematted_computation/blocks/mul", "blocks/mul (forward again)"),
        ("", ""),
    ],
)  # fmt: skip
def test_layers(op_name, layer):
    assert layer_of(op_name) == layer


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("Net/transformer_blocks_0to12/attn/to_q/dot_general (backward)", "attn/to_q"),
        ("transformer_blocks_23/ff/net_0/proj/dot_general", "ff/net_0"),
        ("Net/transformer_blocks_0to12/reduce_sum (forward again)", "a block itself"),
        ("Net/pos_embed/proj/dot_general", "outside of blocks"),
        ("", "outside of blocks"),
    ],
)
def test_modules(layer, module):
    assert module_of(layer) == module
