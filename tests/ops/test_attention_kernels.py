"""Attention kernels in Triton's interpreter against eager and reference: every launch is counted."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ops.attention_compile import SHARED, compile_all
from ops.problems import SHAPES
from ops.test_attention import SCALE, close, make
from tolerances import ATTENTION_FLOAT16, SHORT_SUM_FLOAT32
from treewy.errors import BackendError, CapacityError, ShapeError, UnsupportedError
from treewy.ops import attention
from treewy.ops.attention import Paged, Workspace
from treewy.ops.attention.kernels import geometry
from treewy.ops.launch import LAUNCHES
from treewy.packed import PackedPath, PackedTree, pack, pack_paths
from treewy.tree import DraftTree

TOLERANCES = {torch.float32: SHORT_SUM_FLOAT32, torch.float16: ATTENTION_FLOAT16}
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])


@contextmanager
def launched(*names: str) -> Iterator[None]:
    """Assert that exactly these kernels ran, each once."""
    before = LAUNCHES.copy()
    yield
    assert LAUNCHES - before == dict.fromkeys(names, 1)


class Problem(NamedTuple):
    """The operands of one `verify_paged` call.

    Pages lie in the pool in random order, and what nobody owns holds NaN. Tables' unused entries are far out; those of
    inert sequences are the first one's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    committed: Paged
    tree: PackedTree

    def verify(self, backend="triton", **options):
        call = (self.q, self.k, self.v, self.committed, self.tree.tables)
        if backend != "triton":
            return attention.verify_paged(*call, scale=SCALE, backend=backend)
        with launched("attend_parts_kernel", "merge_parts_kernel"):
            return attention.verify_paged(*call, **{"scale": SCALE, "backend": backend, **options})

    def select(self, seqs, **options):
        """Return the problem of some of its sequences."""
        rows = [row for seq in seqs for row in range(self.tree.starts[seq], self.tree.starts[seq + 1])]
        keys, values, table, lengths = self.committed
        tree = pack([DraftTree(self.tree.shapes[seq]) for seq in seqs], **options)
        rows += [0] * (tree.num_rows - len(rows))
        committed = Paged(keys, values, table[seqs], lengths[seqs])
        return Problem(self.q[rows], self.k[rows], self.v[rows], committed, tree)


def paged(
    shapes, lengths, *, page=8, group=2, heads=2, dim=16, columns=None, num_rows=None, dtype=torch.float32, seed=0
) -> Problem:
    rng = np.random.default_rng(seed)
    tree = pack([SHAPES[name] if isinstance(name, str) else name for name in shapes], num_rows=num_rows)
    needed = [-(-max(length, 0) // page) for length in lengths]
    columns = max(needed, default=0) if columns is None else columns
    pages = rng.permutation(sum(needed) + 2)
    table = rng.integers(-5, 10**6, (len(lengths), columns))

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    keys, values = (torch.full((len(pages), page, heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    for seq, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[seq, :count], pages = pages[:count], pages[count:]
        table[seq] = table[seq if length >= 0 else 0]
        for place in range(max(length, 0)):
            at = table[seq, place // page], place % page
            keys[at], values[at] = normal(2, heads, dim)
    operands = normal(tree.num_rows, heads * group, dim), *normal(2, tree.num_rows, heads, dim)
    committed = Paged(keys, values, torch.from_numpy(table).int(), torch.tensor(lengths, dtype=torch.int32))
    return Problem(*operands, committed, tree)


@pytest.fixture
def short_chunks(monkeypatch):
    """Cut prefixes into at most 3 chunks of 128 places or more, and in fewer where more rows ask."""
    monkeypatch.setattr(geometry, "CHUNKING", geometry.Chunking(128, 256, 16, 1, 24, max_chunks=3))


class TestVerify:
    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize(("heads", "group", "dim", "page"), [(1, 1, 16, 8), (2, 3, 24, 5), (1, 8, 64, 16)])
    def test_kernels_equal_eager_and_reference(self, heads, group, dim, page, dtype):
        shapes, lengths = ["scattered", "root", "chain 11", "chain 3"], [17, 0, 40, -1]
        problem = paged(shapes, lengths, heads=heads, group=group, dim=dim, page=page, dtype=dtype, num_rows=24)
        want = problem._replace(q=problem.q.double(), k=problem.k.double(), v=problem.v.double())
        want = want._replace(committed=Paged(*(pool.double() for pool in want.committed[:2]), *want.committed[2:]))
        want = want.verify("reference")
        close(problem.verify(), want, TOLERANCES[dtype])
        close(problem.verify("eager"), want, TOLERANCES[dtype])

    def test_every_length_around_the_ends_of_chunks(self, short_chunks):
        """Fault F15: chunks of the prefix carry on each other's sums."""
        lengths = [1, 127, 128, 129, 255, 384, 385, 520]
        problem = paged(["root"] * len(lengths), lengths, heads=1, group=1, page=16)
        close(problem.verify(), problem.verify("eager"), SHORT_SUM_FLOAT32)

    def test_many_rows_take_fewer_chunks(self, short_chunks):
        """The kernel and the grid agree on how many there are."""
        rng = np.random.default_rng(1)
        tree = DraftTree([-1, *(int(rng.integers(0, row)) for row in range(1, 40))])
        problem = paged([tree], [390], heads=1, group=1, page=16)
        close(problem.verify(), problem.verify("eager"), SHORT_SUM_FLOAT32)

    def test_trees_wider_than_a_tile(self):
        """Fault G04's kind: every tile of the tree takes its own bits."""
        rng = np.random.default_rng(1)
        trees = [DraftTree([-1, *(int(rng.integers(0, row)) for row in range(1, size))]) for size in (17, 40)]
        problem = paged(trees, [3, 9], heads=1, group=1)
        want = problem.verify()
        close(want, problem.verify("reference"), SHORT_SUM_FLOAT32)
        close(want, problem.verify("eager"), SHORT_SUM_FLOAT32)
        k, v = problem.k.clone(), problem.v.clone()
        k[17 + 20], v[17 + 20] = 3.0, -4.0
        moved = (problem._replace(k=k, v=v).verify() != want).flatten(1).any(dim=1)
        assert not moved[:17].any()
        assert torch.equal(moved[17:], torch.from_numpy(trees[1].ancestors[:, 20].copy()))

    def test_bits_do_not_depend_on_the_batch_or_any_bound(self, short_chunks):
        shapes, lengths = ["scattered", "chain 3", "chain 11"], [300, 20, 130]
        problem = paged(shapes, lengths, heads=1, group=1, page=16)
        whole = problem.verify()
        for seq in range(3):
            rows = slice(problem.tree.starts[seq], problem.tree.starts[seq + 1])
            alone = problem.select([seq])
            assert torch.equal(alone.verify(), whole[rows])
            padded = problem.select([seq], num_rows=rows.stop - rows.start + 3)
            bucket = padded.tree.tables._replace(max_rows=64)
            keys, values, table, lengths = padded.committed
            table = torch.cat([table, torch.full((1, 40), -1, dtype=torch.int32)], dim=1)
            committed = Paged(keys, values, table, lengths)
            got = attention.verify_paged(*padded[:3], committed, bucket, scale=SCALE, backend="triton")
            assert torch.equal(got[:-3], whole[rows])
            assert not got[-3:].any()

    def test_blocks_do_not_change_bits(self, monkeypatch):
        """Tiles of pairs and of value columns are chosen by the size of a launch; sums over places never are."""
        problem = paged(["two arms"], [20], dim=32, heads=1)
        results = []
        for pairs, columns in ((16, 32), (32, 16), (64, 32)):
            blocks = geometry.Geometry(pairs, 16, columns, num_warps=4, num_stages=1)
            monkeypatch.setattr(geometry, "geometry", lambda launch, gpu, blocks=blocks: blocks)
            results.append(problem.verify())
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_rows_past_the_bound_of_a_tree_are_left_out(self, short_chunks):
        """A tree of more rows than fit asks for no more units than the grid has."""
        problem = paged(["chain 11", "chain 3"], [300, 390], heads=1, group=1, page=16)
        tables = problem.tree.tables
        seq_of_row = tables.seq_of_row.clone()
        seq_of_row[4:12] = -1
        tables = tables._replace(seq_of_row=seq_of_row, max_rows=4)
        scratch = attention.workspace(16, 1, 16, 390, device="cpu")
        for part in scratch:
            part.fill_(torch.nan)
        call = (*problem[:3], problem.committed, tables)
        got = attention.verify_paged(*call, scale=SCALE, backend="triton", scratch=scratch)
        want = problem.verify("eager")
        want[4:12] = 0.0
        close(got, want, SHORT_SUM_FLOAT32)

    def test_inert_sequences_and_rows_are_zero(self):
        """Faults C01, C03, C04, C07 and C10: they are neither read nor left as they were."""
        problem = paged(["scattered", "chain 3", "root"], [9, -1, 0], num_rows=13)
        for rows in problem[:3]:
            rows[5:9], rows[10:] = torch.nan, torch.nan
        out = torch.full_like(problem.q, 7.0)
        got = problem.verify(out=out)
        assert got is out
        assert not out[5:9].any()
        assert not out[10:].any()
        close(out, problem.verify("eager"), SHORT_SUM_FLOAT32)

    def test_sequences_without_rows(self):
        """Fault K10: they are skipped, their neighbour is not."""
        problem = paged(["scattered", "root"], [9, 12])
        tables = problem.tree.tables
        cu_rows = torch.tensor([0, 0, 5, 5], dtype=torch.int32)
        seq_of_row = torch.tensor([1] * 5 + [-1], dtype=torch.int32)
        tables = tables._replace(cu_rows=cu_rows, seq_of_row=seq_of_row)
        keys, values, table, lengths = problem.committed
        committed = Paged(keys, values, table[[1, 0, 1]], lengths[[1, 0, 1]])
        got = attention.verify_paged(*problem[:3], committed, tables, scale=SCALE, backend="triton")
        assert torch.equal(got[:5], problem.verify()[:5])
        assert not got[5].any()

    def test_nothing_at_all(self):
        """Fault K10: no rows, or rows that belong to no sequence."""
        empty = pack([])
        committed = Paged(*torch.zeros(2, 3, 4, 1, 8), torch.zeros(0, 2).int(), torch.zeros(0).int())
        got = attention.verify_paged(*torch.zeros(3, 0, 1, 8), committed, empty.tables, scale=1.0, backend="triton")
        assert got.shape == (0, 1, 8)
        inert = pack([], num_rows=2)
        operands = torch.full((3, 2, 1, 8), torch.nan)
        got = attention.verify_paged(*operands, committed, inert.tables, scale=1.0, backend="triton")
        assert torch.equal(got, torch.zeros(2, 1, 8))

    @pytest.mark.parametrize("dim", [16, 32])
    def test_a_row_that_is_not_finite_spoils_those_that_see_it(self, dim, monkeypatch):
        """Fault F10: 0 * NaN is NaN, also where value columns are split over programs and one meets the NaN."""
        blocks = geometry.Geometry(16, 16, 16, num_warps=4, num_stages=1)
        monkeypatch.setattr(geometry, "geometry", lambda launch, gpu: blocks)
        tree = DraftTree.from_widths([3, 2])
        problem = paged([tree, "chain 3"], [9, 6], dim=dim, group=1)
        clean = problem.verify()
        for rows, column, bad in (
            *((problem.v, 0, torch.nan), (problem.v, -1, torch.nan), (problem.v, 0, torch.inf)),
            *((problem.v, -1, -torch.inf), (problem.k, -1, torch.nan)),
        ):
            kept = rows[2].clone()
            rows[2, 0, column] = bad
            got = problem.verify()
            rows[2] = kept
            sees = torch.from_numpy(tree.ancestors[:, 2].copy())
            assert got[:10][sees, 0].isnan().all()
            assert torch.equal(got[:10][~sees], clean[:10][~sees])
            assert torch.equal(got[:, 1], clean[:, 1])
            assert torch.equal(got[10:], clean[10:])

    @pytest.mark.parametrize("scale", [1e4, 1e30])
    def test_strong_scores(self, scale):
        problem = paged(["scattered"], [20])
        call = (*problem[:4], problem.tree.tables)
        got = attention.verify_paged(*call, scale=scale, backend="triton")
        close(got, attention.verify_paged(*call, scale=scale), SHORT_SUM_FLOAT32)

    @pytest.mark.parametrize("shift", [-1e3, 1e3])
    def test_chunks_of_very_different_scores_merge(self, shift, short_chunks):
        problem = paged(["chain 3"], [300])
        problem.committed.keys[problem.committed.block_tables[0, :16].long()] = shift  # equal scores: no rounding
        close(problem.verify(), problem.verify("eager"), SHORT_SUM_FLOAT32)

    def test_views(self):
        """Faults K09 and K12: slices of one projection, pools with heads first, a table in a wide parent."""
        problem = paged(["scattered", "chain 3"], [9, 21], page=4)
        want = problem.verify()
        fused = torch.cat(problem[:3], dim=1)
        keys, values, table, lengths = problem.committed
        pools = torch.stack([keys, values], dim=2)
        heads_first = pools.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
        wide = torch.zeros(2, 100, dtype=torch.int32)
        wide[:, : table.shape[1]] = table
        strided = torch.stack([torch.full_like(lengths, 99), lengths], dim=1)[:, 1]
        committed = Paged(heads_first[:, :, 0], heads_first[:, :, 1], wide[:, : table.shape[1]], strided.contiguous())
        views = Problem(fused[:, :4], fused[:, 4:6], fused[:, 6:], committed, problem.tree)
        out = torch.zeros(9, 16, 4).transpose(1, 2)
        assert torch.equal(views.verify(out=out), want)
        assert torch.equal(out, want)
        columns_first = Paged(keys.mT.contiguous().mT, values, table.T.contiguous().T, lengths)
        assert torch.equal(problem._replace(committed=columns_first).verify(), want)

    def test_slot_and_length_tensors_of_64_bits(self):
        """Fault C13's kind: ids given as int64 were read as int32."""
        problem = paged(["scattered", "chain 3"], [9, 21])
        keys, values, table, lengths = problem.committed
        wide = problem._replace(committed=Paged(keys, values, table.long(), lengths.long()))
        assert torch.equal(wide.verify(), problem.verify())

    def test_offsets_past_32_bits(self):
        """Fault K01's kind: the last page lies 3 * 2**30 elements behind the first, each stride fits 32 bits."""
        far = torch.empty(3 * 2**30 + 64, dtype=torch.float16)
        pool = far.as_strided((4, 4, 1, 16), (2**30, 16, 16, 1))
        rows = torch.randn(4, 4, 1, 16, generator=torch.Generator().manual_seed(0)).half()
        pool[0], pool[3] = rows[0], rows[3]  # the rest of it is never touched, and so never takes memory
        problem = paged(["chain 3"], [8], heads=1, page=4, dtype=torch.float16)
        near = Paged(rows, rows, torch.tensor([[3, 0]], dtype=torch.int32), problem.committed.lengths)
        want = problem._replace(committed=near).verify()
        committed = Paged(pool, pool, *near[2:])
        assert torch.equal(problem._replace(committed=committed).verify(), want)
        path = pack_paths(problem.tree, [[0, 1]]).tables
        at_four = Paged(pool, pool, near.block_tables.flip(1), torch.tensor([4], dtype=torch.int32))
        attention.commit_paged(at_four, problem.k, problem.k, path, backend="triton")
        assert torch.equal(pool[3, :2], problem.k[:2])
        attention.compact_paged(at_four, problem.tree.tables, path._replace(rows=path.rows + 1), backend="triton")
        assert torch.equal(pool[3, 0], problem.k[1])

    def test_a_page_outside_the_pool_is_never_left_for_memory(self):
        problem = paged(["root", "root"], [9, 5])
        keys, values, table, lengths = problem.committed
        keys, values = keys.nan_to_num(), values.nan_to_num()
        broken = table.clone()
        broken[0, :2] = torch.tensor([-1, 10**6])
        bad = problem._replace(committed=Paged(keys, values, broken, lengths))
        got = bad.verify()
        assert got.isfinite().all()
        assert torch.equal(got[1], problem.verify()[1])
        for backend in ("eager", "reference"):
            with pytest.raises(CapacityError, match="page"):
                bad.verify(backend)
        long, full = (
            problem._replace(committed=Paged(keys, values, table, torch.tensor([places, 5], dtype=torch.int32)))
            for places in (10**6, 8 * table.shape[1])
        )
        assert torch.equal(long.verify(), full.verify())
        assert torch.equal(long.verify()[1], got[1])
        for backend in ("eager", "reference"):
            with pytest.raises(CapacityError, match="table"):
                long.verify(backend)

    def test_scratch_may_be_larger_and_dirty(self):
        problem = paged(["scattered", "chain 3"], [9, 21])
        scratch = attention.workspace(40, 4, 16, 5000, device="cpu")
        for part in scratch:
            part.fill_(torch.nan)
        assert torch.equal(problem.verify(scratch=scratch), problem.verify())
        small = attention.workspace(8, 4, 16, 24, device="cpu")
        split = Workspace(scratch.sums[..., ::2], *scratch[1:])
        for bad in (small, split):
            with pytest.raises(CapacityError, match="scratch"):
                problem.verify(scratch=bad)

    def test_verify_never_writes(self):
        problem = paged(["scattered", "chain 3"], [9, 0])
        operands = [*problem[:3], *problem.committed]
        before = [x.clone() for x in operands]
        problem.verify()
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(operands, before, strict=True))


class TestPlainPools:
    """`verify` and `commit` with backend "triton": a slot is one page."""

    @pytest.mark.parametrize("first", [None, [4, 0, 1, 0], [5, 12, 0, 1]])
    def test_verify(self, first):
        shapes = [SHAPES[name] for name in ("scattered", "chain 11", "chain 3", "root")]
        problem = make(shapes, [5, 0, 7, 24], slots=[3, 0, -1, 1], num_slots=5, num_rows=24).to(torch.float32)
        problem.keys[2], problem.values[4], problem.keys[3, 5:] = torch.nan, torch.nan, torch.nan
        if first is not None:
            starts, sizes = problem.tree.starts, problem.tree.sizes
            asking = [
                start + row for start, size, at in zip(starts, sizes, first, strict=False) for row in range(at, size)
            ]
            problem = problem._replace(q=problem.q[[*asking, 22, 23]])
        want = problem.verify(first_query=first)
        with launched("attend_parts_kernel", "merge_parts_kernel"):
            got = problem.verify(first_query=first, backend="triton")
        close(got, want, SHORT_SUM_FLOAT32)

    def test_an_empty_pool(self):
        problem = make([SHAPES["chain 3"]], [0], places=0).to(torch.float32)
        close(problem.verify(backend="triton"), problem.verify(), SHORT_SUM_FLOAT32)

    def test_commit(self):
        problem = make(
            [SHAPES["chain 3"], SHAPES["scattered"], SHAPES["root"]], [2, 5, 0], slots=[2, 0, -1], num_slots=3
        )
        problem = problem.to(torch.bfloat16)
        path = pack_paths(problem.tree, [[], [0, 3, 4], [0]])
        pools = [[x.clone() for x in (problem.keys, problem.values)] for _ in range(2)]
        for (keys, values), backend in zip(pools, ("reference", "triton"), strict=True):
            call = (keys, values, problem.slots, problem.lengths, problem.k, problem.v, path)
            attention.commit(*call, backend=backend)
        assert all(map(torch.equal, *pools))

    @pytest.mark.parametrize("slots", [[0, 3], [-2, 0], [1, 1]])
    def test_bad_slots_are_refused(self, slots):
        problem = make([SHAPES["chain 3"]] * 2, [1, 1], num_slots=3).to(torch.float32)
        problem = problem._replace(slots=torch.tensor(slots))
        with pytest.raises(CapacityError, match="slot"):
            problem.verify(backend="triton")


def committed_by(problem: Problem, path: PackedPath, backend: str, *, compact: bool, dtype=None) -> Paged:
    """Return the pages after a commit; `compact` finds the tree's rows in the pages already."""
    keys, values, table, lengths = problem.committed
    keys, values = (x.to(dtype or x.dtype).clone() for x in (keys, values))
    committed = Paged(keys, values, table, lengths)
    if compact:
        place_tree(problem, committed)
    with launched() if backend != "triton" else launched("compact_rows_kernel" if compact else "commit_rows_kernel"):
        if compact:
            attention.compact_paged(committed, problem.tree.tables, path.tables, backend=backend)
        else:
            attention.commit_paged(committed, problem.k, problem.v, path.tables, backend=backend)
    return committed


def place_tree(problem: Problem, committed: Paged) -> None:
    """Write every tree's rows behind the committed places, as an engine's own kernel would."""
    for seq, length in enumerate(committed.lengths.tolist()):
        for local in range(problem.tree.sizes[seq] if length >= 0 else 0):
            page = committed.block_tables[seq, (length + local) // committed.page_len]
            at, row = (page, (length + local) % committed.page_len), problem.tree.starts[seq] + local
            committed.keys[at], committed.values[at] = problem.k[row], problem.v[row]


def with_room(shapes, lengths, **options) -> Problem:
    """Return a problem whose tables have pages for the whole trees behind the lengths."""
    sizes = [SHAPES[name].num_rows for name in shapes]
    problem = paged(shapes, [n + size if n >= 0 else n for n, size in zip(lengths, sizes, strict=True)], **options)
    keys, values, table, _ = problem.committed
    return problem._replace(committed=Paged(keys, values, table, torch.tensor(lengths, dtype=torch.int32)))


class TestCommit:
    SHAPES = ("scattered", "chain 31", "root", "scattered", "widths 3 3 3")
    LENGTHS = (5, 8, 0, -1, 30)
    PATHS = ((0, 3, 4), tuple(range(25)), (), (0, 3), (0, 2, 8, 26))

    @every_backend
    @pytest.mark.parametrize("page", [3, 16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_paths_become_consecutive(self, dtype, page, backend):
        """Faults C05 and G05: a scattered path lies behind the committed places, and nothing else has changed."""
        problem = with_room(self.SHAPES, self.LENGTHS, page=page, dtype=dtype)
        path = pack_paths(problem.tree, self.PATHS)
        got = committed_by(problem, path, backend, compact=False)
        for pool, rows, old in zip(got[:2], problem[1:3], problem.committed[:2], strict=True):
            want = old.clone()
            for seq, (length, nodes) in enumerate(zip(self.LENGTHS, self.PATHS, strict=True)):
                for step, node in enumerate(nodes if length >= 0 else ()):
                    page_id = problem.committed.block_tables[seq, (length + step) // page]
                    want[page_id, (length + step) % page] = rows[problem.tree.starts[seq] + node]
            assert torch.equal(pool.nan_to_num(7e3), want.nan_to_num(7e3))

    @every_backend
    @pytest.mark.parametrize("page", [3, 16])
    def test_in_place_gives_what_a_commit_gives(self, page, backend):
        """Fault G05: rows that the pages hold already move to consecutive places."""
        problem = with_room(self.SHAPES, self.LENGTHS, page=page)
        path = pack_paths(problem.tree, self.PATHS)
        want = committed_by(problem, path, "eager", compact=False)
        got = committed_by(problem, path, backend, compact=True)
        for seq, (length, nodes) in enumerate(zip(self.LENGTHS, self.PATHS, strict=True)):
            for place in range(length + len(nodes) if length >= 0 else 0):
                at = problem.committed.block_tables[seq, place // page], place % page
                assert torch.equal(got.keys[at], want.keys[at])
                assert torch.equal(got.values[at], want.values[at])

    @every_backend
    def test_in_place_moves_nothing_else(self, backend):
        problem = with_room(["widths 3 3 3", "chain 3"], [5, 9], page=4)
        path = pack_paths(problem.tree, [[0, 3, 12], []])
        keys, values, table, lengths = problem.committed
        before = Paged(keys.clone(), values.clone(), table, lengths)
        place_tree(problem, before)
        got = committed_by(problem, path, backend, compact=True)
        for pool, old in zip(got[:2], before[:2], strict=True):
            same = ((pool == old) | (pool.isnan() & old.isnan())).flatten(2).all(-1)
            changed = {(int(table[0, place // 4]), place % 4) for place in (6, 7)}
            assert {tuple(at) for at in (~same).nonzero().tolist()} == changed

    def test_a_long_path_moves_in_blocks(self):
        """40 rows from every second place: blocks overlap the places that later blocks read."""
        parents = [-1]
        for row in range(1, 80):
            parents.append(max(row - 2 + row % 2, 0) if row % 2 else row - 2)
        tree = DraftTree(parents)
        problem = paged([tree], [100], page=16, heads=1)
        problem = problem._replace(committed=problem.committed._replace(lengths=torch.tensor([7], dtype=torch.int32)))
        path = pack_paths(problem.tree, [tree.path(78)])
        assert len(path.paths[0]) == 40
        got, want = (committed_by(problem, path, backend, compact=True) for backend in ("triton", "eager"))
        assert torch.equal(got.keys.nan_to_num(7e3), want.keys.nan_to_num(7e3))
        assert torch.equal(got.values.nan_to_num(7e3), want.values.nan_to_num(7e3))

    @pytest.mark.parametrize("broken", ["the table ends", "a page to read", "a page to write"])
    def test_kernels_write_nothing_out_of_range(self, broken):
        problem = with_room(["scattered", "chain 3"], [5, 3], page=4)
        keys, values, table, lengths = problem.committed
        place_tree(problem, problem.committed)
        long, short = pack_paths(problem.tree, [[0, 3, 4], [0]]).tables, pack_paths(problem.tree, [[0, 3], [0]]).tables
        if broken == "the table ends":  # after place 7; what lies behind in memory is a good page
            committed = Paged(keys, values, table[:, :2], lengths)
        else:
            table[0, 2 if broken == "a page to read" else 1] = -1 if broken == "a page to read" else 10**6
            committed = problem.committed
        before = keys.clone(), values.clone()
        attention.compact_paged(committed, problem.tree.tables, long, backend="triton")
        assert torch.equal(keys.nan_to_num(7e3), before[0].nan_to_num(7e3))
        for backend in ("eager", "reference"):
            with pytest.raises(CapacityError, match=r"Places|page"):
                attention.compact_paged(committed, problem.tree.tables, long, backend=backend)
        full = committed._replace(lengths=torch.tensor([8 if broken != "a page to write" else 4, 3], dtype=torch.int32))
        attention.commit_paged(full, problem.k, problem.v, short, backend="triton")
        assert torch.equal(keys[table[1, 0], 3], problem.k[5])
        keys[table[1, 0], 3], values[table[1, 0], 3] = before[0][table[1, 0], 3], before[1][table[1, 0], 3]
        assert torch.equal(keys.nan_to_num(7e3), before[0].nan_to_num(7e3))
        assert torch.equal(values.nan_to_num(7e3), before[1].nan_to_num(7e3))
        for backend in ("eager", "reference"):
            with pytest.raises(CapacityError, match=r"Places|page"):
                attention.commit_paged(full, problem.k, problem.v, short, backend=backend)

    @pytest.mark.parametrize("pool", [torch.float16, torch.float32])
    def test_the_pools_dtype_is_kept(self, pool):
        problem = with_room(["chain 3"], [3])
        path = pack_paths(problem.tree, [[0, 1]])
        got = committed_by(problem, path, "triton", compact=False, dtype=pool)
        want = committed_by(problem, path, "eager", compact=False, dtype=pool)
        assert torch.equal(got.keys.nan_to_num(7e3), want.keys.nan_to_num(7e3))


def test_public_names():
    """Pinned, as engines of other people call them."""
    assert attention.__all__ == [
        "Paged",
        "Workspace",
        "commit",
        "commit_paged",
        "compact_paged",
        "verify",
        "verify_paged",
        "workspace",
    ]


class TestRefusals:
    def test_shapes(self):
        good = paged(["scattered", "chain 3"], [9, 3])
        keys, values, table, lengths = good.committed
        tables = good.tree.tables
        bad = [
            good._replace(q=good.q[:, :3]),
            good._replace(q=good.q[:-1], k=good.k[:-1], v=good.v[:-1]),
            good._replace(committed=Paged(keys[:, :, :1], values[:, :, :1], table, lengths)),
            good._replace(committed=Paged(keys, values, table[:1], lengths)),
            good._replace(committed=Paged(keys, values, table[:1], lengths[:1])),
        ]
        for one in bad:
            with pytest.raises(ShapeError, match="got"):
                attention.verify_paged(*one[:4], one.tree.tables, scale=SCALE)
        path = pack_paths(pack([SHAPES["scattered"]]), [[0]]).tables
        with pytest.raises(ShapeError, match="path"):
            attention.commit_paged(good.committed, good.k, good.v, path)
        with pytest.raises(ShapeError, match="path"):
            attention.compact_paged(good.committed, tables, path)

    @pytest.mark.parametrize("backend", ["Triton", "", "auto"])
    def test_an_unknown_backend(self, backend):
        """Fault G06's kind: never something else, silently."""
        x = paged(["root"], [3])
        path = pack_paths(x.tree, [[0]]).tables
        for call in (
            lambda: attention.verify_paged(*x[:4], x.tree.tables, scale=SCALE, backend=backend),
            lambda: attention.commit_paged(x.committed, x.k, x.v, path, backend=backend),
            lambda: attention.compact_paged(x.committed, x.tree.tables, path, backend=backend),
        ):
            with pytest.raises(BackendError, match=f"attention.*{backend!r}"):
                call()

    def test_what_kernels_are_not_made_for(self):
        good = paged(["root"], [3])
        half = Paged(good.committed.keys.half(), good.committed.values.half(), *good.committed[2:])
        double = Paged(good.committed.keys.double(), good.committed.values.double(), *good.committed[2:])
        cases = [
            (good._replace(committed=half), SCALE, "one dtype"),
            (good, 0.0, "scale"),
            (Problem(good.q.double(), good.k.double(), good.v.double(), double, good.tree), SCALE, "float64"),
            (paged(["root"], [3], dim=257), SCALE, "257"),
            (paged(["root"], [3], dtype=torch.bfloat16), SCALE, "interpreter"),
        ]
        for problem, scale, match in cases:
            with pytest.raises(UnsupportedError, match=match):
                attention.verify_paged(*problem[:4], problem.tree.tables, scale=scale, backend="triton")


class TestGeometry:
    H200 = geometry.Gpu(shared=227 * 1024, num_sms=132)
    SMALL = geometry.Gpu(shared=99 * 1024, num_sms=84)

    def test_the_blocks_of_sums_depend_on_head_dim_dtype_and_gpu_alone(self):
        """And a tile of the tree has one word of bits."""
        for gpu in (self.H200, self.SMALL):
            for dim in (64, 96, 128, 192, 256):
                for dtype in geometry.DTYPES:
                    launches = [
                        geometry.Launch(seqs, heads, pairs, places, dim, dtype)
                        for seqs in (1, 8, 128)
                        for heads in (1, 2, 8)
                        for pairs in (1, 8, 65, 512, 1024)
                        for places in (0, 1000, 100000)
                    ]
                    (places,) = {geometry.geometry(launch, gpu).places for launch in launches}
                    assert 32 % places == 0

    def test_a_launch_fills_the_gpu_if_it_can(self):
        small = geometry.geometry(geometry.Launch(1, 2, 32, 4112, 256, torch.bfloat16), self.H200)
        large = geometry.geometry(geometry.Launch(32, 2, 512, 4160, 256, torch.bfloat16), self.H200)
        assert (small.pairs, small.columns) == (64, 128)
        assert (large.pairs, large.columns) == (128, 256)

    def test_no_prefix_has_more_chunks_than_its_bound(self):
        """Also where a longer one has fewer: 12,289 places beside 32 pairs fall into 25 chunks, 12,288 into 32."""
        chunking = geometry.CHUNKING
        assert [math.ceil(length / chunking.chunk_len(length, 32)) for length in (12288, 12289)] == [32, 25]
        for pairs in (1, 8, 32, 96, 97, 128, 256, 257, 1024):
            most = 1
            for length in (*range(1, 20000, 128), *range(128, 20000, 128), 40000, 10**6):
                places = chunking.chunk_len(length, pairs)
                assert places % geometry.GRAIN == 0
                assert chunking.most_chunks(length, pairs) <= chunking.num_parts(length)
            for length in range(128, 20000, 128):
                most = max(most, *(math.ceil(n / chunking.chunk_len(n, pairs)) for n in (length - 127, length)))
                assert most == chunking.most_chunks(length, pairs)

    def test_a_grid_has_the_units_of_every_tree_size(self):
        """A small tree has fewer tiles than the largest and more chunks."""
        chunking = geometry.CHUNKING
        for max_rows, group, places, pairs in (
            (64, 8, 40000, 64),
            (8, 16, 5000, 128),
            (128, 1, 300, 16),
            (16, 8, 0, 64),
        ):
            needed = [
                math.ceil(rows * group / pairs) * chunking.most_chunks(places, rows * group)
                for rows in range(1, max_rows + 1)
            ]
            assert geometry.num_units(max_rows, group, places, pairs, chunking) == max(needed)
        assert geometry.num_units(0, 8, 1000, 64, chunking) == 0

    def test_rows_are_loaded_as_widely_as_their_alignment_allows(self):
        pool = torch.zeros(4, 3, 2, 24, dtype=torch.float16)
        assert geometry.unit_of(pool, pool) == 8
        assert geometry.unit_of(pool, pool[..., :20].contiguous()) == 4
        assert geometry.unit_of(pool.float()) == 4


def test_every_kernel_compiles_for_three_generations():
    """Faults K06 and K07: within the shared memory of each; smaller GPUs get smaller blocks."""
    figures = compile_all()
    kernels = {"attend_parts_kernel", "merge_parts_kernel", "commit_rows_kernel", "compact_rows_kernel"}
    assert {(one.kernel, one.arch) for one in figures} == {(kernel, arch) for kernel in kernels for arch in SHARED}
    assert not [one for one in figures if one.shared > SHARED[one.arch]]
    # Products that the compiler puts one after the other, for a move of a register of theirs, each have a wait.
    grouped = [one for one in figures if one.products]
    assert {one.kernel for one in grouped} == {"attend_parts_kernel"}
    assert not [one for one in grouped if 2 * one.waits > one.products]
