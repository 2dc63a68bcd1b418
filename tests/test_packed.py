"""PackedTree and PackedPath against per-sequence walks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.problems import trees
from treewy.errors import TreeError
from treewy.packed import PackedPath, PackedTree, pack, pack_paths
from treewy.tree import DraftTree

SCATTERED = DraftTree([-1, 0, 0, 0, 3])


@st.composite
def batches(draw):
    """Draw trees of several sequences and the rows of the packed axis."""
    shapes = draw(st.lists(trees(12), max_size=4))
    return shapes, sum(tree.num_rows for tree in shapes) + draw(st.integers(0, 6))


@st.composite
def accepted(draw):
    """Draw a batch with one accepted path per sequence, some of them empty."""
    shapes, num_rows = draw(batches())
    last = [draw(st.integers(-1, tree.num_rows - 1)) for tree in shapes]
    return shapes, num_rows, [tree.path(row) if row >= 0 else [] for tree, row in zip(shapes, last, strict=True)]


def naive_history(shapes, num_rows, width, seq, path):
    """Return where the newest `width` inputs after `path` lie: packed rows, then windows of `width` - 1 (or more)."""
    start = sum(tree.num_rows for tree in shapes[:seq])
    window = [num_rows + seq * (width - 1) + place for place in range(width - 1)]
    return window + [start + row for row in path]


class TestTables:
    @given(batches())
    def test_rows_belong_where_their_sequence_says(self, batch):
        shapes, num_rows = batch
        tree = pack(shapes, num_rows=num_rows)
        inert = num_rows - sum(shape.num_rows for shape in shapes)
        assert tree.num_seqs == len(shapes)
        assert tree.cu_rows.tolist() == list(tree.starts)
        assert tree.seq_of_row.tolist() == [s for s, shape in enumerate(shapes) for _ in shape.parents] + [-1] * inert
        assert tree.parents.tolist() == [p for shape in shapes for p in shape.parents] + [-1] * inert
        assert tree.depth.tolist() == [d for shape in shapes for d in shape.depth.tolist()] + [0] * inert
        assert tree.max_depth == max((shape.max_depth for shape in shapes), default=0)

    @given(batches())
    def test_dense_tables_equal_each_tree_and_are_empty_on_padding(self, batch):
        shapes, num_rows = batch
        tree = pack(shapes, num_rows=num_rows)
        for seq, shape in enumerate(shapes):
            size = shape.num_rows
            assert torch.equal(tree.ancestors[seq, :size, :size], torch.from_numpy(shape.ancestors.copy()))
            assert tree.ancestors[seq].sum() == shape.ancestors.sum()
            assert tree.depth_dense[seq, :size].tolist() == shape.depth.tolist()
            assert (tree.depth_dense[seq, size:] > tree.max_depth).all()
        same = torch.eye(tree.max_size, dtype=torch.bool)
        assert torch.equal(tree.strict_ancestors, tree.ancestors & ~same)

    @given(batches())
    def test_dense_and_packed_are_inverse_and_padding_is_zero(self, batch):
        shapes, num_rows = batch
        tree = pack(shapes, num_rows=num_rows)
        packed = torch.arange(1.0, 2 * num_rows + 1).reshape(num_rows, 2)
        dense = tree.to_dense(packed)
        assert dense.shape == (len(shapes), tree.max_size, 2)
        for seq, shape in enumerate(shapes):
            start = tree.starts[seq]
            assert torch.equal(dense[seq, : shape.num_rows], packed[start : start + shape.num_rows])
            assert not dense[seq, shape.num_rows :].any()
        back = tree.to_packed(dense)
        real = tree.starts[-1]
        assert torch.equal(back[:real], packed[:real])
        assert back.shape == packed.shape
        assert not back[real:].any()

    def test_padding_never_leaks_into_dense_places(self):
        tree = pack([SCATTERED, DraftTree.chain(1)], num_rows=9)
        packed = torch.zeros(9, 1)
        packed[7:] = torch.nan
        assert not tree.to_dense(packed).isnan().any()

    def test_rows_that_only_look_uniform(self):
        """Trees of 3 and 1 rows padded to 6 fill 2 x 3 places by count, not by place."""
        tree = pack([DraftTree.chain(2), DraftTree.chain(0)], num_rows=6)
        assert not tree.is_uniform
        packed = torch.arange(6.0)[:, None]
        assert tree.to_dense(packed)[..., 0].tolist() == [[0, 1, 2], [3, 0, 0]]
        assert tree.to_packed(tree.to_dense(packed))[:, 0].tolist() == [0, 1, 2, 3, 0, 0]

    @pytest.mark.parametrize("shapes", [[SCATTERED], [SCATTERED, DraftTree.chain(4), DraftTree.from_widths([4])]])
    def test_the_uniform_path_equals_the_general_one(self, shapes):
        uniform, padded = pack(shapes), pack(shapes, num_rows=5 * len(shapes) + 3)
        assert uniform.is_uniform
        assert not padded.is_uniform
        packed = torch.randn(5 * len(shapes), 3, 2)
        longer = torch.cat([packed, torch.full((3, 3, 2), torch.nan)])
        assert torch.equal(uniform.to_dense(packed), padded.to_dense(longer))
        dense = uniform.to_dense(packed)
        assert torch.equal(uniform.to_packed(dense), padded.to_packed(dense)[:-3])

    def test_an_empty_batch(self):
        for num_rows in (0, 3):
            tree = pack([], num_rows=num_rows)
            assert (tree.num_seqs, tree.max_size, tree.max_depth) == (0, 0, 0)
            assert tree.cu_rows.tolist() == [0]
            assert tree.seq_of_row.tolist() == [-1] * num_rows
            assert tree.to_dense(torch.ones(num_rows, 2)).shape == (0, 0, 2)
            assert torch.equal(tree.to_packed(torch.ones(0, 0, 2)), torch.zeros(num_rows, 2))
            assert pack_paths(tree, []).rows.shape == (0, 0)
            assert pack_paths(tree, []).newest_inputs(4).shape == (0, 3)

    def test_equal_batches_share_their_tables(self):
        assert pack([SCATTERED]) is pack([SCATTERED.with_tokens([1, 2, 3, 4, 5])])
        assert pack([SCATTERED]) is not pack([SCATTERED], num_rows=6)

    def test_trees_must_fit(self):
        with pytest.raises(TreeError, match="10 rows do not fit num_rows=9"):
            pack([SCATTERED, SCATTERED], num_rows=9)


class TestInputs:
    @given(batches(), st.integers(1, 5))
    def test_nearest_ancestors_equal_a_walk(self, batch, width):
        shapes, num_rows = batch
        table = pack(shapes, num_rows=num_rows).nearest_ancestors(width)
        assert table.shape == (num_rows, width)
        row = 0
        for seq, shape in enumerate(shapes):
            for node in range(shape.num_rows):
                assert table[row].tolist() == naive_history(shapes, num_rows, width, seq, shape.path(node))[-width:]
                row += 1
        for inert in range(row, num_rows):
            assert table[inert].tolist() == [inert] * width

    @given(accepted(), st.integers(2, 5))
    def test_newest_inputs_equal_a_walk(self, case, width):
        shapes, num_rows, paths = case
        packed = pack_paths(pack(shapes, num_rows=num_rows), paths)
        expected = [
            naive_history(shapes, num_rows, width, seq, path)[-(width - 1) :] for seq, path in enumerate(paths) if path
        ]
        assert packed.newest_inputs(width).tolist() == expected


class TestPaths:
    @given(accepted())
    def test_rows_are_packed_rows_in_path_order(self, case):
        shapes, num_rows, paths = case
        tree = pack(shapes, num_rows=num_rows)
        packed = pack_paths(tree, paths)
        global_paths = [[tree.starts[seq] + row for row in path] for seq, path in enumerate(paths)]
        longest = max(map(len, paths), default=0)
        assert packed.lengths == tuple(map(len, paths))
        assert packed.rows.tolist() == [rows + [num_rows] * (longest - len(rows)) for rows in global_paths]
        assert packed.valid.tolist() == [[i < len(rows) for i in range(longest)] for rows in global_paths]
        assert packed.active.tolist() == [seq for seq, rows in enumerate(global_paths) if rows]
        assert packed.last_rows.tolist() == [rows[-1] for rows in global_paths if rows]
        assert packed.packed_rows.tolist() == [row for rows in global_paths for row in rows]

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            pytest.param([3, 4], "row 3 follows row -1", id="not from the root"),
            pytest.param([0, 4], "row 4 follows row 0", id="skips a node"),
            pytest.param([0, 1, 4], "row 4 follows row 1", id="leaves its branch"),
            pytest.param([0, 0], "row 0 follows row 0", id="stands still"),
            pytest.param([0, 3, 4, 5], "row 5 follows row 4", id="past the tree"),
            pytest.param([-1], "row -1", id="negative"),
        ],
    )
    def test_a_path_must_follow_the_tree(self, path, reason):
        with pytest.raises(TreeError, match=f"sequence 1 {reason}"):
            pack_paths(pack([DraftTree.chain(5), SCATTERED]), [[0], path])

    def test_there_must_be_one_path_per_sequence(self):
        with pytest.raises(TreeError, match="1 paths for 2 sequences"):
            pack_paths(pack([SCATTERED, SCATTERED]), [[0]])

    def test_packed_values_are_plain(self):
        tree = pack([SCATTERED])
        path = pack_paths(tree, [[0, 3]])
        assert isinstance(tree, PackedTree)
        assert isinstance(path, PackedPath)
        assert path.paths == ((0, 3),)
