"""Tables whose rows are not all rows of trees: what is none gets zeros and moves nothing, on every backend that runs here."""

import pytest
import torch

from ops.checks import assert_close
from ops.rings import empty_history
from ops.serving import Stream, paths_of
from ops.test_gdn_kernels import SCATTERED, SMALL, problem, raw
from tolerances import KERNEL_TWIN
from treewy.ops import gdn
from treewy.ops.launch import LAUNCHES
from treewy.ops.tree import tables as make_tables
from treewy.packed import pack
from treewy.tree import DraftTree

every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])


def step(x, state, slots, tables, backend, prior=None):
    """Run one step into outputs that start as NaN."""
    before = LAUNCHES["gdn_step"]
    out = Stream(SMALL, 1, dtype=torch.float32).buffers(tables.num_rows)
    slots = torch.tensor(slots, dtype=torch.int32)
    verified = gdn.commit_verify(x, state, slots, tables, prior=prior, out=out, backend=backend)
    assert LAUNCHES["gdn_step"] - before == (backend == "triton")
    return verified


def rows_of(x, rows):
    return gdn.Projections(*(part[rows] for part in x[:5]), *x[5:])


def framed(part, before, behind, fill=torch.nan):
    """Return rows with others before and behind them."""
    edges = (part.new_full((count, *part.shape[1:]), fill) for count in (before, behind))
    return torch.cat([next(edges), part, next(edges)])


def same_record(got, rows, want):
    return all(map(torch.equal, raw(part[rows] for part in got.record), raw(want.record)))


@every_backend
@pytest.mark.parametrize("before", [1, 20])
def test_rows_before_the_first_tree(before, backend):
    """And those behind the last one."""
    x, state = problem([SCATTERED, DraftTree.chain(1)])
    tables = pack([SCATTERED, DraftTree.chain(1)]).tables
    want = step(x, state, [2, 0], tables, backend)
    x = gdn.Projections(*(framed(part, before, 3) for part in x[:5]), *x[5:])
    parents = framed(tables.parents, before, 3, -1)
    moved = make_tables(parents, tables.cu_rows + before, max_rows=5, backend="reference")
    got = step(x, state, [2, 0], moved, backend)
    assert torch.equal(got.o, framed(want.o, before, 3, 0.0))
    assert same_record(got, slice(before, before + 7), want)
    assert (step(x, state, [-1, -1], moved, backend).o == 0).all()
    nobody = make_tables(parents, torch.tensor([before]), max_rows=5, backend="reference")
    assert (step(x, state, [], nobody, backend).o == 0).all()


@every_backend
@pytest.mark.parametrize("num_rows", [6, 40])
@pytest.mark.parametrize("made", [False, True])
def test_rows_past_the_bound_of_a_tree(made, num_rows, backend):
    """From place `max_rows` on, whether the tables say that these rows are inert or not."""
    trees = [DraftTree.chain(num_rows - 1), DraftTree.chain(1)]
    x, state = problem(trees)
    tables = pack(trees).tables
    tables = tables._replace(max_rows=3)
    if made:
        tables = make_tables(tables.parents, tables.cu_rows, max_rows=3, backend="reference")
    few = [0, 1, 2, num_rows, num_rows + 1]
    want = step(rows_of(x, few), state, [2, 0], pack([DraftTree.chain(2), DraftTree.chain(1)]).tables, backend)
    for part in x[:5]:
        part[3:num_rows] = torch.nan
    got = step(x, state, [2, 0], tables, backend)
    assert torch.equal(got.o[few], want.o)
    assert (got.o[3:num_rows] == 0).all()
    assert same_record(got, few, want)


@pytest.mark.parametrize("row", [-1, 7, 2**30, -(2**31)])
@pytest.mark.parametrize(("fold", "capacity"), [(1, 0), (0, 4), (1, 4)])
def test_kernels_read_no_row_past_a_record(row, fold, capacity):
    """It counts for the nearest that there is; the memory on both sides is another's."""
    trees = [SCATTERED, DraftTree.chain(1)]
    x, state = problem(trees)
    tables = pack(trees).tables
    record = step(x, state, [2, 0], tables, "triton").record
    memory = [framed(part, 3, 3) for part in record]
    results = []
    for last, rows in ((row, gdn.Record(*(part[3:10] for part in memory))), (0 if row < 0 else 6, record)):
        history = empty_history(state, 1, capacity) if capacity else None
        prior = gdn.Prior(
            history, rows, paths_of([0, 5], [[0, last], [0]], 2), torch.tensor([fold, 0], dtype=torch.int32)
        )
        pool = state.clone()
        results.append(raw([step(x, pool, [2, 0], tables, "triton", prior).o, pool, *(history or ())]))
    assert all(map(torch.equal, *results))


@every_backend
def test_what_is_no_tree(backend):
    """A row whose parent comes after it and what hangs below, among rows that are sound; and a tree with no root."""
    tree = DraftTree([-1, 0, 1, 1, 2, 1, 0])
    x, state = problem([tree, DraftTree.chain(1)])
    parents = pack([tree, DraftTree.chain(1)]).tables.parents
    parents[2], parents[7] = 4, 0
    broken = make_tables(parents, torch.tensor([0, 7, 9]), max_rows=7, backend="reference")
    sound = [0, 1, 3, 5, 6]
    want = step(rows_of(x, sound), state, [1], pack([DraftTree([-1, 0, 1, 1, 0])]).tables, backend)
    x.v[4] = x.k[2] = x.a[8] = torch.nan
    got = step(x, state, [1, 0], broken, backend)
    assert (got.o[[2, 4, 7, 8]] == 0).all()
    assert_close(got.o[sound], want.o.double().numpy(), KERNEL_TWIN)
    assert_close(got.record.u[sound], want.record.u.double().numpy(), KERNEL_TWIN)
