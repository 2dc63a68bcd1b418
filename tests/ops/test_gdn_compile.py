"""The kernel of the gated delta rule compiles for every generation, as its entry launches it, within their shared memory."""

import pytest

from ops.compiling import SHARED_LIMIT
from ops.specialise import compile_all

CASES = {
    "ring, 4 rows": {"archs": [90, 120]},
    "reconstruct, 15 rows": {"rows": 15, "history": 0, "archs": [80, 90]},
    "exact, 40 rows": {"rows": 40, "history": 0, "state": "float32", "exact": True, "archs": [120]},
    "float32, K = 192, V = 96": {"dims": [192, 96], "dtype": "float32", "state": "float32", "archs": [90]},
    "128 rows": {"rows": 128, "history": 0, "path": 0, "archs": [120]},
    "finished rows, no history": {"entry": "verify", "history": 0, "archs": [90]},
    "finished rows, a history": {"entry": "verify", "archs": [120]},
    "commit": {"entry": "commit", "archs": [120]},
    "append": {"entry": "append", "archs": [120]},
    "fold": {"entry": "fold", "archs": [120]},
}

APPENDS = {
    "chain 3": {"path": 4, "state": "float32", "archs": [80, 90, 120]},
    "17 rows": {"path": 17, "archs": [90]},
    "one row, odd dims": {"path": 1, "dims": [96, 40], "dtype": "float16", "archs": [80]},
}


@pytest.fixture(scope="module")
def everything():
    """Figures of `CASES`, then those of `APPENDS`."""
    return compile_all([*CASES.values(), *({"entry": "append_layers", **case} for case in APPENDS.values())])


@pytest.fixture(scope="module")
def compiled(everything):
    return [one for one in everything if one["kernel"] == "gdn_step"]


def test_it_compiles(compiled):
    """One kernel per case and generation; on an H100 the state meets the rows in warp-group products."""
    archs = [arch for case in CASES.values() for arch in case["archs"]]
    assert [(one["kernel"], one["arch"]) for one in compiled] == [("gdn_step", arch) for arch in archs]
    assert all(one["group_products"] > 0 for one in compiled if one["arch"] == 90)


def test_shared_memory_fits(compiled):
    """Tiles that a card has no room for would not launch."""
    assert max(one["shared"] for one in compiled) <= SHARED_LIMIT


def test_small_trees_do_not_spill(compiled):
    """Stack is where registers go that a program had no room for."""
    assert not [one for one in compiled[:4] if one["stack"] > 0]


def test_appending_for_all_layers_compiles(everything, compiled):
    """For every generation, in registers; rows of 128 are loaded and stored 16 bytes a thread, and never less."""
    ours = everything[len(compiled) :]
    assert [(one["kernel"], one["arch"]) for one in ours] == [
        ("append_layers_kernel", arch) for case in APPENDS.values() for arch in case["archs"]
    ]
    assert not [one for one in ours if one["stack"] > 0 or one["shared"] > SHARED_LIMIT]
    # A program has 128 threads for 4 rows of 1024 elements.
    assert [(one["wide_loads"], one["wide_stores"]) for one in ours[:3]] == [(12, 12)] * 3
    assert (ours[3]["wide_loads"], ours[3]["wide_stores"]) == (8, 8)
