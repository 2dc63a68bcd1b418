"""The CUDA kernel compiles for GPUs that are not here, within their shared memory, and refuses what does not fit."""

import re

import pytest
import torch

from treewy.errors import BackendError, UnsupportedError
from treewy.ops.gdn.cuda.variant import Variant, choose, source
from treewy.ops.nvrtc import compile_cubin, compile_log

# Compute capability and bytes of shared memory that a block may have.
GPUS = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}
HALF, FULL = torch.bfloat16, torch.float32

CASES = {
    "chain 4": {"max_rows": 4, "max_prior": 20, "state": HALF, "u": HALF, "exact": False, "num_heads": 4096},
    "15 rows, float32": {"max_rows": 15, "max_prior": 4, "state": FULL, "u": FULL, "exact": False, "num_heads": 4096},
    "40 rows": {"max_rows": 40, "max_prior": 20, "state": HALF, "u": HALF, "exact": False, "num_heads": 4096},
    "15 rows after 80": {"max_rows": 15, "max_prior": 80, "state": FULL, "u": HALF, "exact": True, "num_heads": 4096},
    "one sequence, exact": {"max_rows": 40, "max_prior": 4, "state": FULL, "u": FULL, "exact": True, "num_heads": 32},
}


@pytest.mark.parametrize("capability", GPUS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills(name, capability):
    """Fault K07: each variant for each card; the source asserts that its shared memory is what the host reserves."""
    variant = choose(**CASES[name], shared_limit=GPUS[capability])
    log = compile_log(source(), variant.macros(), capability)
    assert variant.shared_bytes <= GPUS[capability]
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]
    assert len(compile_cubin(source(), variant.macros(), capability)) > 10_000


def test_two_warps_of_a_lean_block_compile():
    """The state of 32 values is smaller than the system that lies in its place."""
    asked = {"max_rows": 64, "max_prior": 48, "state": HALF, "u": FULL, "exact": False, "num_heads": 4096}
    variant = choose(**asked, shared_limit=GPUS[12, 0])
    assert (variant.nw, variant.lean) == (2, 1)
    assert len(compile_cubin(source(), variant.macros(), (12, 0))) > 10_000


def test_less_shared_memory_picks_smaller_blocks():
    """Fault K06: tiles are tied to the card."""
    wide = CASES["15 rows, float32"] | {"max_rows": 64}
    large, small = (choose(**wide, shared_limit=limit) for limit in (227 * 1024, 99 * 1024))
    assert large.value_blocks == 1
    assert small.value_blocks > 1
    assert small.shared_bytes <= 99 * 1024


def test_lean_where_that_makes_room_for_another_block():
    """By shared memory, 64 rows with a history get two blocks of eight warps; without, there is nothing to gain."""
    asked = CASES["40 rows"] | {"max_rows": 64}
    lean, roomy = (choose(**asked | {"max_prior": prior}, shared_limit=227 * 1024) for prior in (20, 4))
    assert (lean.lean, lean.min_blocks) == (1, 2)
    assert (roomy.lean, roomy.min_blocks) == (0, 2)
    assert 2 * (lean.shared_bytes + 1024) <= 228 * 1024 < 2 * (lean._replace(lean=0).shared_bytes + 1024)
    assert not choose(**asked | {"num_heads": 32}, shared_limit=227 * 1024).lean


def test_few_heads_are_refused_nothing_that_many_get():
    """What fits a small card when it is lean is taken lean, whatever the batch."""
    asked = CASES["40 rows"] | {"max_rows": 64, "state": FULL, "u": FULL}
    few, many = (choose(**asked | {"num_heads": heads}, shared_limit=GPUS[12, 0]) for heads in (32, 4096))
    assert few.lean
    assert few.shared_bytes <= GPUS[12, 0]
    assert many.lean


def test_what_fits_nowhere_is_refused():
    """Fault K06: more shared memory was asked for than the card has."""
    with pytest.raises(UnsupportedError, match=r"must have [0-9]+ bytes of shared memory.*gives 20000"):
        choose(**CASES["40 rows"], shared_limit=20_000)
    with pytest.raises(UnsupportedError, match="up to 64 tree rows; got 65"):
        choose(**CASES["chain 4"] | {"max_rows": 65}, shared_limit=227 * 1024)
    with pytest.raises(UnsupportedError, match="up to 80 prior rows; got 81"):
        choose(**CASES["chain 4"] | {"max_prior": 81}, shared_limit=227 * 1024)


def test_a_source_that_does_not_compile_says_why():
    variant = choose(**CASES["chain 4"], shared_limit=227 * 1024)
    wrong = Variant(*variant).macros() | {"SHARED_BYTES": 1}
    with pytest.raises(BackendError, match="what the host reserves"):
        compile_cubin(source(), wrong, (9, 0))
