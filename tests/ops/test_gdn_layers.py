"""Appending to the histories of all layers at once: what appending to each does, wherever rows and histories lie."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.serving import paths_of
from tolerances import TWO_FLOAT32
from treewy.errors import BackendError, CapacityError, ShapeError, UnsupportedError
from treewy.ops import gdn
from treewy.ops.gdn import layers_kernels
from treewy.ops.launch import LAUNCHES
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

DEVICE = "cpu"
LAYERS, PLACES, CAPACITY, HEADS, GROUP, KEYS, VALUES = 3, 6, 8, 1, 2, 5, 3
F32, BF16 = torch.float32, torch.bfloat16
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])
# More pieces than one of u and k, and more than one tile of rows.
TREES = [DraftTree.chain(5), DraftTree([-1, 0, 0, 0, 3]), DraftTree([-1]), DraftTree.chain(3), DraftTree.chain(1)]
PATHS = [[0, 1, 2, 3, 4], [0, 3, 4], [], [0, 1], [0]]
AT, HELD = [4, 0, 2, 5, -1], [3, 0, 2, 6, 0]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(layers_kernels, "ELEMENTS", 4)


def raw(tensors):
    return [part.contiguous().view(torch.uint8).clone() for part in tensors]


def same(ours, theirs):
    return all(map(torch.equal, raw(ours), raw(theirs)))


def rows(*leading, seed, u=F32, k=F32, dims=(HEADS, GROUP, KEYS, VALUES)):
    """Return random rows: u, k and two parts of decays that fall along the last leading axis."""
    generator = torch.Generator().manual_seed(seed)
    heads, group, keys, values = dims
    shapes = (heads * group, values), (heads, keys), (heads * group,), (heads * group,)
    u_rows, k_rows, high, low = (torch.randn(*leading, *shape, generator=generator) for shape in shapes)
    return u_rows.to(u), k_rows.to(k), -high.abs().cumsum(-2), 1e-8 * low


def fields(tree=True):
    """Return packed rows of `PATHS`."""
    packed = pack(TREES)
    return packed, paths_of(packed.starts, PATHS, 6)


def operands(*, u=F32, k=F32, index=torch.int64, held=HELD, at=AT, num_places=PLACES, seed=0):
    """Return (history, places, record, path); whatever nobody owns is NaN: other places, and rows on no path."""
    packed, path = fields()
    history = gdn.StackedHistory(
        *(torch.full_like(part, torch.nan) for part in rows(LAYERS, num_places, CAPACITY, seed=0, u=u, k=k)),
        torch.zeros(num_places, dtype=index),
    )
    for seq, (place, count) in enumerate(zip(at, held, strict=True)):
        if 0 <= place < num_places:
            history.lengths[place] = count
            mine = rows(LAYERS, CAPACITY, seed=seed + 20 + seq, u=u, k=k)
            for part, filled in zip(history[:4], mine, strict=True):
                part[:, place, :count] = filled[:, :count]
    record = gdn.StackedRecord(*rows(LAYERS, packed.num_rows, seed=seed + 1, u=u, k=k))
    used = [packed.starts[seq] + row for seq, path_ in enumerate(PATHS) if at[seq] >= 0 for row in path_]
    for part in record:
        part[:, [row for row in range(packed.num_rows) if row not in used]] = torch.nan
    return history, torch.tensor(at, dtype=index), record, path


def copy(history):
    return gdn.StackedHistory(*(part.clone() for part in history))


def append(history, places, record, path, backend):
    """Append, and see that the kernel ran once, or not at all."""
    before, launches = history.lengths.clone(), sum(LAUNCHES.values())
    gdn.append_layers(history, places, record, path, backend=backend)
    assert sum(LAUNCHES.values()) - launches == (backend == "triton")
    assert torch.equal(history.lengths, before)


def one_by_one(history, places, record, backend):
    """Return what appending to each layer leaves, lengths as they were."""
    want = copy(history)
    path = pack_paths(pack(TREES), PATHS)
    for layer in range(LAYERS):
        one = gdn.History(*(part[layer] for part in want[:4]), want.lengths.clone())
        gdn.append(one, places, gdn.Record(*(part[layer] for part in record)), path, backend=backend)
    return want


@every_backend
def test_it_is_append_layer_by_layer(backend):
    """Bit for bit, NaN in all that nobody owns; behind nothing, behind few rows, up to the last place."""
    history, places, record, path = operands()
    like = "eager" if backend == "triton" else backend  # dims that the other kernel does not have
    want = one_by_one(history, places, record, like)
    append(history, places, record, path, backend)
    assert same([history.u, history.k], [want.u, want.k])
    if backend != "triton":
        assert same(history, want)
    for ours, theirs in zip(history[2:4], want[2:4], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
    sums = (part.decay_high.double() + part.decay_low.double() for part in (history, want))
    torch.testing.assert_close(*sums, rtol=TWO_FLOAT32, atol=0, equal_nan=True)
    assert history.u[:, 4, :8].isfinite().all()
    assert history.u[:, [1, 3]].isnan().all()
