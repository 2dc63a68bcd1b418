"""Tree attention against a full softmax over each row's own prefix and root path, and the move of accepted rows."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.problems import SHAPES, trees
from tolerances import EXACT, SHORT_SUM_BFLOAT16, SHORT_SUM_FLOAT32
from treewy.errors import CapacityError, ShapeError
from treewy.ops import attention
from treewy.packed import PackedTree, PathTables, pack, pack_paths
from treewy.tree import DraftTree

both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])
SCALE = 8**-0.5


class Problem(NamedTuple):
    """The operands of one `verify` call, all rows asking."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    lengths: list[int]
    tree: PackedTree

    def verify(self, **options):
        return attention.verify(*self, **{"scale": SCALE, **options})

    def to(self, dtype):
        return self._replace(**{name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "keys", "values")})


def make(shapes, lengths, *, group=2, heads=2, dim=8, places=24, slots=None, num_slots=None, num_rows=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tree = pack(shapes, num_rows=num_rows)
    slots = list(range(len(shapes))) if slots is None else slots
    num_slots = max(slots, default=0) + 1 if num_slots is None else num_slots

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Problem(
        normal(tree.num_rows, heads * group, dim),
        normal(tree.num_rows, heads, dim),
        normal(tree.num_rows, heads, dim),
        normal(num_slots, places, heads, dim),
        normal(num_slots, places, heads, dim),
        torch.tensor(slots, dtype=torch.int64),
        list(lengths),
        tree,
    )


def close(got, want, tolerance):
    assert got.shape == want.shape
    assert got.isfinite().all()
    if want.numel():
        assert (got.double() - want.double()).abs().max() <= tolerance * max(1.0, want.abs().max().item())


def plain(problem, seq, node, scale=SCALE):
    """Attend from one node with PyTorch's own attention over its prefix and path."""
    path = DraftTree(problem.tree.shapes[seq]).path(node)
    rows = [problem.tree.starts[seq] + row for row in path]
    slot, length = problem.slots[seq], problem.lengths[seq]
    k = torch.cat([problem.keys[slot, :length], problem.k[rows]]).transpose(0, 1)
    v = torch.cat([problem.values[slot, :length], problem.v[rows]]).transpose(0, 1)
    q = problem.q[rows[-1]][:, None]
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[:, 0]


class TestVerify:
    @both_backends
    @pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 4), (2, 3), (4, 1)])
    def test_every_row_attends_to_its_prefix_and_path(self, heads, group, backend):
        shapes = [SHAPES[name] for name in ("scattered", "root", "chain 11", "widths 3 3 3")]
        problem = make(shapes, [0, 5, 1, 24], heads=heads, group=group, slots=[3, 0, 2, 5])
        out = problem.verify(backend=backend)
        for seq, shape in enumerate(shapes):
            for node in range(shape.num_rows):
                close(out[problem.tree.starts[seq] + node], plain(problem, seq, node), EXACT)

    @settings(max_examples=50)
    @given(data=st.data())
    def test_eager_equals_reference(self, data):
        shapes = data.draw(st.lists(trees(12), max_size=3))
        slots = data.draw(st.permutations(range(5)))[: len(shapes)]
        slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
        lengths = [data.draw(st.integers(0, 24)) for _ in shapes]
        rows = sum(tree.num_rows for tree in shapes) + data.draw(st.integers(0, 4))
        problem = make(shapes, lengths, slots=slots, num_slots=5, num_rows=rows)
        close(problem.verify(), problem.verify(backend="reference"), EXACT)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, SHORT_SUM_FLOAT32), (torch.bfloat16, SHORT_SUM_BFLOAT16)]
    )
    def test_low_precision(self, dtype, tolerance):
        problem = make([SHAPES["widths 3 3 3"], SHAPES["chain 31"]], [20, 0]).to(dtype)
        out = problem.verify()
        assert out.dtype == dtype
        close(out, problem.to(torch.float64).verify(backend="reference"), tolerance)

    @both_backends
    @pytest.mark.parametrize("first", [[2, 0, 4], [4, 0, 4], [0, 1, 5]])
    def test_first_query(self, first, backend):
        """Only the last rows of each tree ask; keys and values are still all there."""
        problem = make([SHAPES["scattered"], SHAPES["root"], SHAPES["scattered"]], [3, 2, 0], num_rows=13)
        whole = problem.verify(backend=backend)
        starts, sizes = problem.tree.starts, problem.tree.sizes
        asking = [start + row for start, size, at in zip(starts, sizes, first, strict=False) for row in range(at, size)]
        asking += [11, 12]  # inert rows ask too
        some = problem._replace(q=problem.q[asking]).verify(first_query=first, backend=backend)
        close(some, whole[asking], EXACT)

    @pytest.mark.parametrize("first", [[-1, 0], [0, 6], [0]])
    def test_first_query_must_lie_in_the_tree(self, first):
        with pytest.raises(ShapeError, match="first_query"):
            make([SHAPES["scattered"]] * 2, [0, 0]).verify(first_query=first)

    @both_backends
    def test_fault_g01_positions_are_the_callers(self, backend):
        """Fault G01: rotary positions were taken from the flat row. Node 4 of [-1, 0, 0, 0, 3] stands at depth 2."""
        length, tree = 7, SHAPES["scattered"]
        problem = make([tree], [length])

        def rotate(x, positions):
            angle = torch.as_tensor(positions, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.5, 0.25, 0.1])
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

        keys = rotate(problem.keys[0], range(24))[None]
        depths = length + tree.depth
        rotated = problem._replace(keys=keys, q=rotate(problem.q, depths), k=rotate(problem.k, depths))
        node = rotated.verify(backend=backend)[4]
        path = tree.path(4)
        chain = problem._replace(
            keys=keys,
            q=rotate(problem.q[path], range(length, length + 3)),
            k=rotate(problem.k[path], range(length, length + 3)),
            v=problem.v[path],
            tree=pack([DraftTree.chain(2)]),
        )
        close(node, chain.verify(backend=backend)[-1], EXACT)

    @both_backends
    @pytest.mark.parametrize("num_rows", [2, 5, 33, 64, 65, 130])
    def test_fault_g04_only_ancestors_are_attended(self, num_rows, backend):
        """Fault G04: tiles under the diagonal skipped the mask, which is right for chains only."""
        rng = np.random.default_rng(num_rows)
        tree = DraftTree([-1] + [int(rng.integers(0, row)) for row in range(1, num_rows)])
        problem = make([tree], [4], dim=2)
        base = problem.verify(backend=backend)
        for changed in {1, num_rows // 2, num_rows - 1}:
            k, v = problem.k.clone(), problem.v.clone()
            k[changed], v[changed] = 5.0, -7.0
            got = problem._replace(k=k, v=v).verify(backend=backend)
            moved = (got != base).flatten(1).any(dim=1)
            assert torch.equal(moved, torch.from_numpy(tree.ancestors[:, changed].copy()))

    @both_backends
    @pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
    @pytest.mark.parametrize("length", [0, 9])
    def test_strong_scores(self, scale, length, backend):
        """Scores whose exponential overflows: the winner takes all, in the prefix or in the tree."""
        problem = make([SHAPES["scattered"]], [length])
        out = problem.verify(scale=scale, backend=backend)
        for node in range(5):
            close(out[node], plain(problem, 0, node, scale), EXACT)
        single = problem.to(torch.float32).verify(scale=scale * 1e20, backend=backend)
        assert single.isfinite().all()
        assert single.abs().max() <= max(problem.v.abs().max(), problem.values.abs().max())

    @both_backends
    @pytest.mark.parametrize("shift", [-1e4, 1e4])
    def test_prefix_and_tree_of_very_different_scores_merge(self, shift, backend):
        problem = make([SHAPES["scattered"]], [6])
        direction = problem.q.mean(dim=(0, 1))
        problem = problem._replace(keys=problem.keys + shift * direction)
        out = problem.verify(backend=backend)
        for node in range(5):
            close(out[node], plain(problem, 0, node), EXACT)

    @both_backends
    @pytest.mark.parametrize("poison", [torch.nan, 1e4])
    def test_poisoned_memory_is_not_read(self, poison, backend):
        shapes = [SHAPES["scattered"], SHAPES["chain 3"], SHAPES["root"]]
        clean = make(shapes, [5, 3, 0], slots=[3, -1, 1], num_slots=5, num_rows=13)
        dirty = clean._replace(**{name: getattr(clean, name).clone() for name in ("q", "k", "v", "keys", "values")})
        for rows in (dirty.q, dirty.k, dirty.v):
            rows[5:9], rows[10:] = poison, poison
        for pool in (dirty.keys, dirty.values):
            pool[[0, 2, 4]], pool[3, 5:], pool[1] = poison, poison, poison
        want, got = clean.verify(backend=backend), dirty.verify(backend=backend)
        assert torch.equal(got, want)
        assert not got[5:9].any()
        assert not got[10:].any()

    @both_backends
    def test_a_nan_stays_in_its_request(self, backend):
        problem = make([SHAPES["scattered"], SHAPES["chain 3"]], [4, 4])
        want = problem.verify(backend=backend)
        problem.k[1], problem.values[0, 2] = torch.nan, torch.nan
        got = problem.verify(backend=backend)
        assert torch.equal(got[5:], want[5:])
        assert got[:5].isnan().any()

    @both_backends
    def test_verify_never_writes(self, backend):
        problem = make([SHAPES["scattered"], SHAPES["chain 3"]], [4, 0])
        before = [x.clone() for x in problem[:6]]
        problem.verify(backend=backend)
        assert all(map(torch.equal, problem[:6], before))

    def test_operands_that_are_views(self):
        problem = make([SHAPES["scattered"], SHAPES["chain 3"]], [4, 9])
        fused = torch.cat([problem.q, problem.k, problem.v], dim=1)
        pools = torch.stack([problem.keys, problem.values], dim=2)
        views = problem._replace(
            q=fused[:, :4], k=fused[:, 4:6], v=fused[:, 6:], keys=pools[:, :, 0], values=pools[:, :, 1]
        )
        close(views.verify(), problem.verify(), EXACT)

    def test_a_row_does_not_depend_on_neighbours(self):
        both = make([SHAPES["scattered"], SHAPES["chain 3"]], [4, 9], num_rows=12)
        together = both.to(torch.float32).verify()
        for seq, name in enumerate(["scattered", "chain 3"]):
            span = slice(both.tree.starts[seq], both.tree.starts[seq + 1])
            alone = both._replace(
                q=both.q[span],
                k=both.k[span],
                v=both.v[span],
                slots=both.slots[seq : seq + 1],
                lengths=both.lengths[seq : seq + 1],
                tree=pack([SHAPES[name]]),
            )
            close(together[span], alone.to(torch.float32).verify(), SHORT_SUM_FLOAT32)


class TestCommit:
    @both_backends
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fault_g05_a_scattered_path_becomes_consecutive(self, dtype, backend):
        """Fault G05: path 0-3-4 was taken for rows 0-1-2."""
        problem = make([SHAPES["chain 3"], SHAPES["scattered"]], [2, 5], slots=[2, 0], num_slots=3).to(dtype)
        keys, values = problem.keys.clone(), problem.values.clone()
        path = pack_paths(problem.tree, [[0], [0, 3, 4]])
        attention.commit(keys, values, problem.slots, [2, 5], problem.k, problem.v, path, backend=backend)
        for pool, old, rows in ((keys, problem.keys, problem.k), (values, problem.values, problem.v)):
            want = old.clone()
            want[2, 2] = rows[0]
            want[0, 5:8] = rows[[4, 7, 8]]
            assert torch.equal(pool, want)

    @both_backends
    def test_committed_rows_are_then_a_prefix(self, backend):
        """A step after the commit sees what a run of the accepted path as a chain would."""
        problem = make([SHAPES["scattered"]], [5])
        path = pack_paths(problem.tree, [[0, 3, 4]])
        keys, values = problem.keys.clone(), problem.values.clone()
        attention.commit(keys, values, problem.slots, [5], problem.k, problem.v, path, backend=backend)
        following = make([SHAPES["root"]], [8], seed=1)._replace(keys=keys, values=values)
        rows = [0, 3, 4]
        chain = problem._replace(
            q=torch.cat([problem.q[rows], following.q]),
            k=torch.cat([problem.k[rows], following.k]),
            v=torch.cat([problem.v[rows], following.v]),
            tree=pack([DraftTree.chain(3)]),
        )
        close(following.verify(backend=backend)[0], chain.verify(backend=backend)[-1], EXACT)

    @both_backends
    def test_empty_paths_and_inert_slots_keep_every_bit(self, backend):
        problem = make([SHAPES["chain 3"]] * 3, [3, 4, 0], slots=[1, -1, 0], num_slots=3)
        problem.keys[1, 3, 0, 0] = torch.nan
        keys, values = problem.keys.clone(), problem.values.clone()
        path = pack_paths(problem.tree, [[], [0, 1], [0]])
        attention.commit(keys, values, problem.slots, problem.lengths, problem.k, problem.v, path, backend=backend)
        for pool, old in ((keys, problem.keys), (values, problem.values)):
            assert torch.equal(pool[1:].view(torch.uint8), old[1:].view(torch.uint8))
            assert torch.equal(pool[0, 1:], old[0, 1:])

    @both_backends
    def test_a_path_must_fit_the_pool(self, backend):
        problem = make([SHAPES["chain 3"]], [22])
        keys, values = problem.keys.clone(), problem.values.clone()
        for rows, fits in (([0, 1], True), ([0, 1, 2], False)):
            path = pack_paths(problem.tree, [rows])
            call = (keys, values, problem.slots, [22], problem.k, problem.v, path)
            if fits:
                attention.commit(*call, backend=backend)
                keys, values = problem.keys.clone(), problem.values.clone()
            else:
                with pytest.raises(CapacityError, match=r"22 \+ 3"):
                    attention.commit(*call, backend=backend)
        assert torch.equal(keys, problem.keys)

    @both_backends
    @pytest.mark.parametrize("slots", [[0, 3], [-2, 0], [1, 1]])
    def test_bad_slots_are_refused(self, slots, backend):
        problem = make([SHAPES["chain 3"]] * 2, [1, 1], num_slots=3)._replace(slots=torch.tensor(slots))
        with pytest.raises(CapacityError, match="slot"):
            problem.verify(backend=backend)
        with pytest.raises(CapacityError, match="slot"):
            attention.commit(
                problem.keys,
                problem.values,
                problem.slots,
                [1, 1],
                problem.k,
                problem.v,
                pack_paths(problem.tree, [[0], [0]]),
                backend=backend,
            )


def pages_for_two(seed=0):
    """Return pages with 3 and 2 committed places, rows of trees of 5 and 3 rows, and those trees' tables."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 4, 4, 1, 2, generator=generator)
    table, lengths = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    k, v = torch.randn(2, 8, 1, 2, generator=generator)
    tree = pack([DraftTree([-1, 0, 0, 0, 3]), DraftTree.chain(2)])
    return attention.Paged(keys, values, table, lengths), k, v, tree


@both_backends
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("row", "length", "said"),
    [
        (-1, 2, "has -1"),
        (8, 2, "has 8 among"),
        (2**30, 2, "has 1073741824"),
        (0, 4, "length of 4"),
        (0, -1, "length of -1"),
    ],
)
def test_path_rows_that_there_are_not_are_refused(row, length, said, compact, backend):
    """Nothing is written then; and of an inert sequence, or past a path, nothing is looked at."""
    committed, k, v, tree = pages_for_two()
    path = PathTables(torch.tensor([[0, row, 9], [5, -7, 99]], dtype=torch.int32), torch.tensor([length, 1]).int())
    before = [pool.clone() for pool in committed[:2]]

    def commit(pages):
        if compact:
            attention.compact_paged(pages, tree.tables, path, backend=backend)
        else:
            attention.commit_paged(pages, k, v, path, backend=backend)

    with pytest.raises(ShapeError, match=said):
        commit(committed)
    assert all(map(torch.equal, before, committed[:2]))
    commit(committed._replace(lengths=torch.tensor([-1, 2], dtype=torch.int32)))
    assert torch.equal(committed.keys[:2], before[0][:2])


@both_backends
def test_a_row_of_another_tree_is_no_place_of_this_one(backend):
    committed, _, _, tree = pages_for_two()
    for rows in ([[0, 5], [5, 6]], [[0, 1], [5, 4]]):
        path = PathTables(torch.tensor(rows, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32))
        with pytest.raises(ShapeError, match=r"must lie in (0\.\.4|5\.\.7)"):
            attention.compact_paged(committed, tree.tables, path, backend=backend)


def test_path_tables_of_other_sequences_are_refused():
    committed, k, v, tree = pages_for_two()
    path = PathTables(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for call in (
        lambda: attention.commit_paged(committed, k, v, path),
        lambda: attention.compact_paged(committed, tree.tables, path),
    ):
        with pytest.raises(ShapeError, match="A path must be"):
            call()


def test_refusals():
    good = make([SHAPES["chain 3"], SHAPES["root"]], [2, 3])
    for bad in (
        good._replace(q=good.q[:-1]),
        good._replace(q=good.q[:, :3]),
        good._replace(k=good.k[:-1], v=good.v[:-1]),
        good._replace(lengths=[2]),
        good._replace(slots=good.slots[:1]),
    ):
        with pytest.raises(ShapeError, match="got"):
            bad.verify()
    for lengths in ([2, 25], [-1, 0]):
        with pytest.raises(CapacityError, match="length"):
            good._replace(lengths=lengths).verify()
    path = pack_paths(good.tree, [[0], [0]])
    with pytest.raises(ShapeError, match="got"):
        attention.commit(good.keys, good.values, good.slots, [2], good.k, good.v, path)
