"""Seconds of a program by hand: loops, kernels, collectives, transfers, and what has no estimate."""

import math
import pathlib

import pytest

from digen_jax.errors import ConfigError
from digen_jax.planning.chips import CHIPS, Chip, chip_of
from digen_jax.planning.costs import (
    COLLECTIVES,
    COMPILER,
    KERNELS,
    OTHERS,
    TRANSFERS,
    estimate_text,
)
from digen_jax.planning.kernels import KERNEL_SHARE, PACKED_SHARES

PROGRAMS = pathlib.Path(__file__).parent / "programs"

# Round numbers: with the stated shares, 0.5, 0.8 and 0.8, a kernel does 1e6 FLOPs a second, the memory moves 1e6
# bytes, a link 1e3.
CHIP = Chip("toy", 1000.0, 2e6, 10**9, 1.25e6, 1.25e3, 64)

PROGRAM = (PROGRAMS / "every_kind.txt").read_text()


@pytest.fixture(scope="module")
def found():
    return estimate_text(PROGRAM, CHIP)


def near(expected):
    return pytest.approx(expected, rel=1e-12)


def test_the_compilers_cycles_count_as_often_as_they_run(found):
    assert found.of(COMPILER) == near((5 * 31 + 500) / 1000)
    slowest = found.slowest(2, COMPILER)
    assert [(item.name, item.times, item.seconds) for item in slowest] == [
        ("copy.1", 1, 0.5),
        ("fusion.1", 5, 0.03),
    ]
    assert (
        slowest[1].layer == "blocks/to_q/dot_general"
    )  # of its product, not of what is fused to it


def test_kernels_take_their_flops_at_the_stated_share_of_the_peak(found):
    kernels = found.by_what(KERNELS)
    assert kernels["splash_mha_fwd"][2] == near(
        6 * 4 * 2 * 100 * 100 * 32 / (1e6 * 32 / 64)
    )  # float32
    assert kernels["stated"][2] == near(3.0)
    assert kernels["silent"][2] == near(64 / 1e6)  # in and out of memory


def test_packed_attention_leaves_the_matrix_unit_partly_idle_like_other_heads_of_its_width():
    """It states its FLOPs, and its name the width of its heads, which is half of this chip's matrix unit."""
    text = PROGRAM.replace("%stated", "%attention_forward_32")
    packed = estimate_text(text, CHIP).by_what(KERNELS)["attention_forward_32"]
    as_wide = estimate_text(PROGRAM, CHIP).by_what(KERNELS)["stated"][2]
    share = PACKED_SHARES["forward"][128, 64]
    assert packed[2] == near(2 * as_wide * KERNEL_SHARE / share)


def test_flops_are_those_of_products_and_kernels(found):
    assert found.flops == 5 * 2 * 2 * 4 * 4 + 4 * 2 * 100 * 100 * 32 + 3_000_000
    assert found.repeated == 0


def test_collectives_are_rings_over_one_link(found):
    assert found.by_what(COLLECTIVES) == {
        "all-gather": (1, 128, near(0.75 * 128 / 1e3)),
        "all-reduce": (1, 32, near(2 * 0.75 * 32 / 1e3)),
        "collective-permute": (1, 32, near(32 / 1e3)),
    }


def test_nothing_is_dropped(found):
    # A copy from fast memory to the main one only writes there; of a slice that is fetched, only the slice is read.
    assert found.by_what(TRANSFERS) == {
        "copy-start": (1, 32, near(32 / 1e6)),
        "slice-start": (1, 8, near(8 / 1e6)),
    }
    assert found.by_what(OTHERS) == {
        "sort": (1, 64, near(64 / 1e6)),
        "compare": (5, 45, near(45 / 1e6)),
    }
    kinds = [found.of(kind) for kind in (COMPILER, KERNELS, COLLECTIVES, TRANSFERS, OTHERS)]
    assert found.seconds == near(sum(kinds)) and found.unknown_loops == ()
    assert found.cycles(CHIP) == near(1000 * found.seconds)


GPU = (PROGRAMS / "gpu.txt").read_text()
MATMUL = 2 * 256**3
ATTENTION = 2 * (2 * 4 * 128 * 320) * 64  # a product of queries or scores
CONVOLUTION = 2 * (2 * 10 * 12 * 32) * (3 * 3 * 16)


def test_calls_of_nvidias_libraries_take_the_flops_of_their_shapes():
    found = estimate_text(GPU, CHIP)
    assert found.flops == 3 * MATMUL + (2 + 5) * ATTENTION + 3 * CONVOLUTION
    assert found.repeated == 3 * MATMUL and found.unknown_loops == ()
    seconds = {what: took for what, (_, _, took) in found.by_what(KERNELS).items()}
    assert seconds == {
        "__cublas$lt$matmul": near(3 * MATMUL / 1e6),
        "__cudnn$fmhaSoftmax": near(2 * ATTENTION / 1e6),
        "__cudnn$fmhaSoftmaxBackward": near(5 * ATTENTION / 1e6),
        "__cudnn$convForward": near(2 * CONVOLUTION / 1e6),  # TF32 has half the peak
        "__cudnn$convBackwardInput": near(16 * CONVOLUTION / 1e6),  # exact float32
        "__cudnn$convBackwardFilter": near(2 * CONVOLUTION / 1e6),
    }


def test_a_fusion_reads_and_writes_only_what_it_slices():
    row, index = 256 * 256 * 2, 4
    sizes = {item.name: item.bytes for item in estimate_text(GPU, CHIP).items}
    assert sizes["slice"] == 2 * row + index
    assert sizes["update"] == 2 * row + index


def test_a_call_of_a_library_whose_work_is_unknown_is_an_error():
    with pytest.raises(ValueError, match=r"__cudnn\$norm"):
        estimate_text(GPU.replace("__cudnn$convForward", "__cudnn$norm"), CHIP)


def test_a_loop_of_unknown_length_is_named():
    text = PROGRAM.replace("%zero = s32[] constant(0)", "%zero = s32[] add(%which, %which)")
    assert estimate_text(text, CHIP).unknown_loops == ("while",)


def test_the_facts_of_chips_fit_one_another():
    """Peak = clock x FLOPs a cycle, and matrix units are squares of multiply-adds."""
    assert {chip.name: round(chip.flops / 1e12) for chip in CHIPS.values() if chip.clock} == {
        "v4": 138, "v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 1153
    }  # fmt: skip
    for chip in CHIPS.values():
        if chip.clock:
            units = chip.flops_a_cycle / (2 * chip.array**2)
            assert math.isclose(units, round(units))


def test_an_unknown_chip_is_a_mistake_in_words():
    assert chip_of("TPU v5 lite").name == "v5e"
    with pytest.raises(
        ConfigError, match="nothing is known of the chip 'TPU v99': choose one of v4, "
    ):
        chip_of("TPU v99")
