"""tools/tpu_cycles.py: programs as text, trips of loops, layers, and seconds by hand."""

import pathlib

import pytest

from digen_jax.planning.hardware import Chip
from tools import tpu_cycles
from tools.tpu_cycles import COLLECTIVES, COMPILER, KERNELS, OTHERS, TRANSFERS, Array, Cycles

PROGRAMS = pathlib.Path(__file__).parent / "programs"
PROGRAM = (PROGRAMS / "every_kind.txt").read_text()
# As the TPU compiler writes scans: no count; start, limit and step are constants.
LOOPS = (PROGRAMS / "loops.txt").read_text()

# Round numbers: with the stated shares, 0.5, 0.8 and 0.8, a kernel does 1e6 FLOPs a second, the memory moves 1e6
# bytes, a link 1e3.
CHIP = Chip("toy", 2e6, 10**9, 1.25e6, 1.25e3)


@pytest.fixture(autouse=True)
def core(monkeypatch):
    monkeypatch.setitem(tpu_cycles.CORES, "toy", tpu_cycles.Core(1000.0, 64))


def near(expected):
    return pytest.approx(expected, rel=1e-12)


def test_trips_of_nested_loops_follow_from_constants():
    cycles = Cycles(LOOPS, CHIP)
    times = {item.name: item.times for item in cycles.items}
    assert (times["begin"], times["dot"]) == (3, 3 * 7)
    assert not cycles.unknown_loops


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=LE"),
        ("%zero.4 = s32[] constant(0)", "%zero.4 = s32[] constant(1)"),
        ("%one.2 = s32[]{:T(128)} constant(1)", "%one.2 = s32[]{:T(128)} constant(2)"),
        ("%limit.1 = s32[]{:T(128)} constant(7)", "%limit.1 = s32[]{:T(128)} custom-call(%i.1)"),
    ],
)
def test_a_loop_of_another_form_counts_once_and_the_report_says_so(old, new):
    assert old in LOOPS
    cycles = Cycles(LOOPS.replace(old, new), CHIP)
    assert "while.4" in cycles.unknown_loops
    assert "while.4" in tpu_cycles.report("train", cycles)


def test_an_instruction_may_span_lines_and_have_results_of_any_type():
    computations, name = tpu_cycles.parse((PROGRAMS / "kernel.txt").read_text())
    entry = computations[name]
    wide = entry.instructions["wide"]
    assert [i.opcode for i in entry.operands(wide)] == ["parameter"]
    shapes = {"f32": (2,), "s8": (3,), "u4": (5,), "pred": ()}
    assert wide.arrays == tuple(Array(*array) for array in shapes.items())
    assert wide.bytes == 8 + 3 + 3 + 1
    assert (wide.cycles, wide.op_name) == ("14844", "jit(g)/kernel(a)/x")
    assert entry.root.name == "r"


@pytest.mark.parametrize(
    ("op_name", "layer", "module"),
    [
        ("jit(f)/jvp(Net)/while/body/closed_call/blocks_3/to_q/dot", "blocks_3/to_q/dot", "to_q"),
        ("transpose(jvp(Net))/blocks_0to12/ff/net_2/dot", "blocks_0to12/ff/net_2/dot (backward)", "ff/net_2"),
        ("jvp(a/b)/checkpoint/rematted_computation/blocks_0/mul", "blocks_0/mul (forward again)", "a block itself"),
        ("jit(f)/pos_embed/proj/dot", "pos_embed/proj/dot", "outside of blocks"),
        ("", "", "outside of blocks"),
    ],
)  # fmt: skip
def test_layers_and_their_modules(op_name, layer, module):
    assert (tpu_cycles.layer_of(op_name), tpu_cycles.module_of(layer)) == (layer, module)


def test_every_kind_of_operation_counts_as_often_as_it_runs():
    found = Cycles(PROGRAM, CHIP)
    assert found.seconds(COMPILER) == near((5 * 31 + 500) / 1000)
    items = sorted(found.items, key=lambda item: -item.total * (item.kind == COMPILER))[:2]
    assert [(item.name, item.times, item.seconds) for item in items] == [
        ("copy.1", 1, 0.5),
        ("fusion.1", 5, 0.03),
    ]
    assert items[1].layer == "blocks/to_q/dot_general"  # of its product, not of what is fused to it
    kernels = found.by_what(KERNELS)
    flops, passes = 4 * 2 * 100 * 100 * 32, 6  # of float32
    assert kernels["splash_mha_fwd"][2] == near(passes * flops / (1e6 * 32 / 64))
    assert kernels["stated"][2] == near(3.0)
    assert kernels["silent"][2] == near(64 / 1e6)  # in and out of memory
    # Rings over one link.
    assert found.by_what(COLLECTIVES) == {
        "all-gather": (1, 128, near(0.75 * 128 / 1e3)),
        "all-reduce": (1, 32, near(2 * 0.75 * 32 / 1e3)),
        "collective-permute": (1, 32, near(32 / 1e3)),
    }
    # A copy from fast memory to the main one only writes there; of a slice that is fetched, only the slice is read.
    assert found.by_what(TRANSFERS) == {
        "copy-start": (1, 32, near(32 / 1e6)),
        "slice-start": (1, 8, near(8 / 1e6)),
    }
    others = {"sort": (1, 64, near(64 / 1e6)), "compare": (5, 45, near(45 / 1e6))}
    assert found.by_what(OTHERS) == others
    assert found.seconds() == near(sum(map(found.seconds, tpu_cycles.KINDS)))


def test_packed_attention_leaves_the_matrix_unit_partly_idle_like_other_heads_of_its_width():
    """It states its FLOPs, and its name the width of its heads, which is half of this chip's matrix unit."""
    text = PROGRAM.replace("%stated", "%attention_forward_32")
    packed = Cycles(text, CHIP).by_what(KERNELS)["attention_forward_32"]
    as_wide = Cycles(PROGRAM, CHIP).by_what(KERNELS)["stated"][2]
    share = tpu_cycles.PACKED_SHARES["forward"][128, 64]
    assert packed[2] == near(2 * as_wide * tpu_cycles.KERNEL_SHARE / share)
