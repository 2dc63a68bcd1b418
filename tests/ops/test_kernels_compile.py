"""Every kernel compiles for every generation of GPUs, within the shared memory and registers that they have.

A room adds its kernels to `CASES`: each variant that its host code can choose and that the others do not stand for.
"""

import pytest

from ops.compiling import ARCHS, SHARED_LIMIT, Case, Compiled, compile_all
from treewy.ops.conv.kernels import BLOCKS, COMMIT_CHANNELS, COMMIT_WARPS
from treewy.ops.gdn.ledger_kernels import BLOCK


def _convolution(dtype: str, blocks, *, taps_apart: bool = True, window_apart: bool = False, width: int = 4) -> Case:
    """A launch of `convolve_paths`; windows lie [S, W - 1, C], or [S, C, W - 1] if they are apart."""
    pointers = dict.fromkeys(["p_y", "p_x", "p_weight", "p_window"], f"*{dtype}:16")
    tables = {"p_slots": "*i64", "p_parents": "*i32", "p_seq_of_row": "*i32", "p_cu_rows": "*i32"}
    plain = ["num_rows", "num_slots", "stride_slots"]
    even = ["num_channels", "stride_y_row", "stride_x_row", "stride_bias", "stride_window_slot"]
    even += ["stride_weight_tap"] if taps_apart else []
    even += [] if window_apart else ["stride_window_row"]
    units = ["stride_y_channel", "stride_x_channel"]
    units += ["stride_weight_channel" if taps_apart else "stride_weight_tap"]
    units += ["stride_window_row" if window_apart else "stride_window_channel"]
    odd = ([] if taps_apart else ["stride_weight_channel"]) + (["stride_window_channel"] if window_apart else [])
    integers = {**dict.fromkeys(plain + odd, "i32"), **dict.fromkeys(even, "i32:16")}
    sizes = {"BT": blocks.rows, "BC": blocks.channels}
    constexprs = {
        "p_bias": None,
        **dict.fromkeys(units, 1),
        "W": width,
        "SILU": True,
        "ALIKE": not window_apart,
        **sizes,
    }
    return Case(
        "treewy.ops.conv.kernels:convolve_paths",
        {**pointers, **tables, **integers},
        constexprs,
        {"num_warps": blocks.warps},
    )


def _shift(dtype: str, window: str, width: int = 4) -> Case:
    """A launch of `shift_windows`."""
    pointers = {
        "p_window": f"*{window}:16",
        "p_x": f"*{dtype}:16",
        "p_slots": "*i64",
        "p_path": "*i32",
        "p_lengths": "*i32",
    }
    plain = ["num_slots", "num_rows", "num_places", "stride_slots", "stride_path", "stride_lengths"]
    even = ["num_channels", "stride_window_layer", "stride_window_slot", "stride_window_row", "stride_x_layer"]
    integers = {**dict.fromkeys(plain, "i32"), **dict.fromkeys([*even, "stride_x_row"], "i32:16")}
    units = dict.fromkeys(["stride_window_channel", "stride_x_channel"], 1)
    sizes = {"W1": width - 1, "BW": 1 << (width - 2).bit_length(), "BC": COMMIT_CHANNELS}
    return Case(
        "treewy.ops.conv.kernels:shift_windows",
        {**pointers, **integers},
        {**units, **sizes},
        {"num_warps": COMMIT_WARPS},
    )


def _ledger(kernel: str, index: str) -> Case:
    """A launch of one of the ledger's kernels."""
    pointers = {"p_lengths": f"*{index}", "p_slots": f"*{index}", "p_path": "*i32", "p_fold": "*i32"}
    integers = ["num_seqs", "num_slots", "stride_lengths", "stride_slots", "stride_path", "stride_fold"]
    integers += ["capacity"] if kernel == "choose_folds_kernel" else []
    return Case(
        f"treewy.ops.gdn.ledger_kernels:{kernel}", {**pointers, **dict.fromkeys(integers, "i32")}, {"BLOCK": BLOCK}
    )


CASES = [
    *(_convolution("bf16", blocks) for blocks in BLOCKS.values()),
    _convolution("fp32", BLOCKS[max(BLOCKS)], width=8),
    _convolution("fp16", BLOCKS[0], taps_apart=False, window_apart=True),
    _shift("bf16", "bf16"),
    _shift("bf16", "fp32", width=8),
    *(_ledger(kernel, index) for kernel in ("choose_folds_kernel", "settle_kernel") for index in ("i64", "i32")),
]


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_all(CASES)


def test_every_case_was_compiled(compiled):
    """Fault K07: every one of them, and no two under one name."""
    assert [(one.case, one.arch) for one in compiled] == [(case.name, arch) for case in CASES for arch in ARCHS]
    assert len({(one.case, one.arch) for one in compiled}) == len(compiled)


def test_shared_memory_fits(compiled):
    """Fault K06: every kernel fits the smallest card."""
    assert not [one for one in compiled if one.shared > SHARED_LIMIT]


def test_nothing_spills(compiled):
    """Stack is where registers go that a program had no room for."""
    assert not [one for one in compiled if one.stack > 0]
