"""Attention kernels on a GPU at real sizes: against eager in float32 or float64, and in one graph for every tree."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from ops.test_attention import close
from tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT16, ATTENTION_FLOAT32
from treewy.ops import attention
from treewy.ops.attention import Paged
from treewy.packed import PackedTree, PathTables, TreeTables, pack, pack_paths
from treewy.tree import DraftTree

pytestmark = pytest.mark.gpu
TOLERANCES = {
    torch.bfloat16: ATTENTION_BFLOAT16,
    torch.float16: ATTENTION_FLOAT16,
    torch.float32: ATTENTION_FLOAT32,
}
LENGTHS = [0, 1, 1023, 1025, 4096, -1, 20000, 17]


def random_tree(rows: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    return DraftTree([-1, *(int(rng.integers(0, row)) for row in range(1, rows))])


class Problem(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    committed: Paged
    tree: PackedTree

    def verify(self, **options):
        scale = self.q.shape[2] ** -0.5
        return attention.verify_paged(*self[:4], self.tree.tables, **{"scale": scale, "backend": "triton", **options})

    def exact(self, **options):
        wide = torch.float32 if self.q.dtype != torch.float32 else torch.float64
        q, k, v, keys, values = (x.to(wide) for x in (*self[:3], *self.committed[:2]))
        problem = Problem(q, k, v, Paged(keys, values, *self.committed[2:]), self.tree)
        return problem.verify(backend="eager", **options)

    def select(self, seqs: list[int]) -> "Problem":
        rows = [row for seq in seqs for row in range(self.tree.starts[seq], self.tree.starts[seq + 1])]
        keys, values, table, lengths = self.committed
        tree = pack([DraftTree(self.tree.shapes[seq]) for seq in seqs], device="cuda")
        return Problem(self.q[rows], self.k[rows], self.v[rows], Paged(keys, values, table[seqs], lengths[seqs]), tree)


def paged(
    sizes, lengths, *, heads=2, group=8, dim=256, page=16, dtype=torch.bfloat16, room=128, padding=0, seed=0
) -> Problem:
    """Random trees of these sizes on random pages; what nobody owns holds NaN, tables' unused entries are far out."""
    torch.manual_seed(seed)
    tree = pack(
        [random_tree(size, seed + i) for i, size in enumerate(sizes)], num_rows=sum(sizes) + padding, device="cuda"
    )
    columns = -(-(max(lengths) + room) // page)
    needed = [-(-(length + room) // page) if length >= 0 else 0 for length in lengths]
    pages = torch.randperm(sum(needed) + 3).int()
    table = torch.full((len(lengths), columns), 2**30, dtype=torch.int32)
    keys, values = torch.full((2, len(pages), page, heads, dim), torch.nan, dtype=dtype, device="cuda")
    for seq, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[seq, :count], pages = pages[:count], pages[count:]
        places = torch.arange(max(length, 0))
        at = table[seq, places // page].long().cuda(), (places % page).cuda()
        keys[at], values[at] = torch.randn(2, len(places), heads, dim, device="cuda", dtype=dtype)
    q = torch.randn(tree.num_rows, heads * group, dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, tree.num_rows, heads, dim, device="cuda", dtype=dtype)
    lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Problem(q, k, v, Paged(keys, values, table.cuda(), lengths), tree)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128])
def test_real_shapes(rows):
    problem = paged([rows] * len(LENGTHS), LENGTHS, padding=5)
    got = problem.verify()
    close(got.float(), problem.exact(), ATTENTION_BFLOAT16)
    assert not got[5 * rows : 6 * rows].any()
    assert not got[-5:].any()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "page"),
    [(2, 8, 64, 16), (8, 1, 96, 32), (1, 6, 128, 64), (4, 4, 192, 24), (2, 8, 256, 1056), (1, 16, 256, 1)],
)
def test_heads_dims_and_pages(heads, group, dim, page, dtype):
    problem = paged([5, 40, 1], [3000, 70, 0], heads=heads, group=group, dim=dim, page=page, dtype=dtype)
    close(problem.verify().double(), problem.exact().double(), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bits_do_not_depend_on_the_batch_or_any_bound(dim, dtype):
    """Batches of 1 and 33 get other tiles and other splits of columns; buckets are other bounds of the same step."""
    sizes = [4, 64, 16, *[7] * 30]
    lengths = [5000, 3000, 17000, *range(900, 1200, 10)]
    problem = paged(sizes, lengths, dim=dim, dtype=dtype, padding=7)
    whole = problem.verify()
    assert whole[: problem.tree.starts[-1]].isfinite().all()
    for seq in (0, 1, 2, 20):
        alone = problem.select([seq])
        rows = slice(problem.tree.starts[seq], problem.tree.starts[seq + 1])
        assert torch.equal(alone.verify(), whole[rows])
        scale = dim**-0.5
        bucket = alone.tree.tables._replace(max_rows=128)
        assert torch.equal(attention.verify_paged(*alone[:4], bucket, scale=scale, backend="triton"), whole[rows])


def test_a_row_that_is_not_finite_spoils_those_that_see_it():
    problem = paged([40, 16], [5000, 2000])
    clean = problem.verify()
    sees = torch.from_numpy(DraftTree(problem.tree.shapes[0]).ancestors[:, 3].copy()).cuda()
    for rows, bad in ((problem.v, torch.nan), (problem.v, torch.inf), (problem.k, torch.nan)):
        kept = rows[3].clone()
        rows[3, 0, -1] = bad
        got = problem.verify()
        rows[3] = kept
        assert got[:40][sees, :8].isnan().all()
        assert torch.equal(got[:40][~sees], clean[:40][~sees])
        assert torch.equal(got[:, 8:], clean[:, 8:])
        assert torch.equal(got[40:], clean[40:])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1e3), (torch.bfloat16, 1e30), (torch.float32, 1e30)])
def test_strong_scores(dtype, scale):
    """The winner takes all; the rounding error of a huge score is not exponentiated."""
    problem = paged([16], [3000], dtype=dtype)
    got = problem.verify(scale=scale)
    assert got.isfinite().all()
    if scale > 1e20:  # at lower scales the two largest scores may lie within a rounding of each other
        close(got.double(), problem.exact(scale=scale).double(), TOLERANCES[dtype])


def test_pools_past_32_bits():
    """Fault K02's kind: pages behind the first 2**31 elements of a pool."""
    problem = paged([4], [40])
    keys, values, table, lengths = problem.committed
    want, far = problem.verify(), 2**31 // keys[0].numel()
    large = [torch.empty(far + len(pool), *pool.shape[1:], dtype=pool.dtype, device="cuda") for pool in (keys, values)]
    for pool, rows in zip(large, (keys, values), strict=True):
        pool[far:] = rows
    moved = table[:, :11] + far
    committed = Paged(*large, moved, lengths)
    assert torch.equal(problem._replace(committed=committed).verify(), want)
    path = pack_paths(problem.tree, [DraftTree(problem.tree.shapes[0]).path(3)])
    near = Paged(keys, values, table[:, :11], lengths)
    for pages in (committed, near):
        attention.commit_paged(pages, problem.k, problem.v, path.tables, backend="triton")
        attention.compact_paged(pages, problem.tree.tables, path.tables, backend="triton")
    assert torch.equal(large[0][far:].nan_to_num(9.0), keys.nan_to_num(9.0))
    assert torch.equal(large[1][far:].nan_to_num(9.0), values.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [96, 256])
def test_commits(dim, dtype):
    sizes = [16, 64, 1, 128, 7, 40]
    problem = paged(sizes, [5, 1000, 0, 63, -1, 4096], dim=dim, dtype=dtype)
    deepest = [int(np.argmax(DraftTree(shape).depth)) for shape in problem.tree.shapes]
    paths = [DraftTree(shape).path(node) for shape, node in zip(problem.tree.shapes, deepest, strict=True)]
    path = pack_paths(problem.tree, [[], *paths[1:]])
    keys, values, table, lengths = problem.committed
    results = []
    for backend in ("eager", "triton"):
        pages = Paged(keys.clone(), values.clone(), table, lengths)
        attention.commit_paged(pages, problem.k, problem.v, path.tables, backend=backend)
        in_place = Paged(keys.clone(), values.clone(), table, lengths)
        whole = PathTables(*whole_trees(problem.tree))
        attention.commit_paged(in_place, problem.k, problem.v, whole, backend="triton")
        attention.compact_paged(in_place, problem.tree.tables, path.tables, backend=backend)
        results.append([x.nan_to_num(9.0) for x in (*pages[:2], *in_place[:2])])
    assert all(map(torch.equal, *results))


def whole_trees(tree: PackedTree) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables that take every row of a tree for its path, in order."""
    rows = torch.tensor(tree.starts[:-1], device="cuda")[:, None] + torch.arange(tree.max_size, device="cuda")
    return rows.int(), torch.tensor(tree.sizes, dtype=torch.int32, device="cuda")


def test_one_graph_for_every_tree_length_and_table():
    """Captured on inert operands; every replay's bits are those of an uncaptured call with the step's own bounds."""
    rows, batch, columns, device = 64, 4, 1400, "cuda"
    torch.manual_seed(0)
    keys, values = torch.randn(2, 5600, 16, 2, 256, device=device, dtype=torch.bfloat16)
    q = torch.randn(batch * rows, 16, 256, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch * rows, 2, 256, device=device, dtype=torch.bfloat16)
    empty = pack([], num_rows=batch * rows, device=device).tables
    tables = TreeTables(
        empty.parents.clone(),
        torch.zeros(batch + 1, dtype=torch.int32, device=device),
        empty.seq_of_row.clone(),
        empty.depth.clone(),
        torch.zeros(batch * rows, rows // 32, dtype=torch.int32, device=device),
        rows,
    )
    lengths = torch.full((batch,), -1, dtype=torch.int32, device=device)
    table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
    path = PathTables(torch.zeros(batch, 16, dtype=torch.int32, device=device), torch.zeros_like(lengths))
    committed = Paged(keys, values, table, lengths)
    out = torch.empty_like(q)
    scratch = attention.workspace(*q.shape, committed.max_places, device=device)

    def step():
        attention.verify_paged(q, k, v, committed, tables, scale=1 / 16, out=out, scratch=scratch, backend="triton")
        attention.commit_paged(committed, k, v, path, backend="triton")
        attention.compact_paged(committed, tables, path, backend="triton")

    before = keys.clone()
    step()
    assert torch.equal(keys, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_, (sizes, given) in enumerate(
        [
            ([64, 1, 16, 40], [20000, 0, 1024, 5000]),
            ([4, 4, 4, 4], [100, -1, 3000, 16385]),
            ([1, 64, 64, 64], [4096, 4097, 77, -1]),
        ]
    ):
        trees = [random_tree(size, round_ + 10 * i) for i, size in enumerate(sizes)]
        packed = pack(trees, num_rows=batch * rows, device=device)
        q.copy_(torch.randn_like(q))
        for name in ("parents", "cu_rows", "seq_of_row", "depth"):
            getattr(tables, name).copy_(getattr(packed.tables, name))
        tables.ancestors.zero_()
        tables.ancestors[:, : packed.tables.ancestors.shape[1]].copy_(packed.tables.ancestors)
        lengths.copy_(torch.tensor(given))
        table.copy_(torch.randperm(5600).view(batch, columns))
        chosen = pack_paths(packed, [tree.path(tree.num_rows - 1)[:16] for tree in trees])
        path.rows.zero_()
        path.rows[:, : chosen.tables.rows.shape[1]].copy_(chosen.tables.rows)
        path.lengths.copy_(chosen.tables.lengths)
        own = Paged(keys.clone(), values.clone(), table.clone(), lengths.clone())
        want = attention.verify_paged(q, k, v, own, packed.tables, scale=1 / 16, backend="triton")
        attention.commit_paged(own, k, v, chosen.tables, backend="triton")
        attention.compact_paged(own, packed.tables, chosen.tables, backend="triton")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert torch.equal(keys, own.keys)
        assert torch.equal(values, own.values)
