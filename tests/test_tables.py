"""Tables of trees and paths as kernels take them, against the tree's own."""

import numpy as np
import pytest
import torch

from ops.problems import SHAPES
from treewy.packed import WORD, pack, pack_paths
from treewy.tree import DraftTree


@pytest.mark.parametrize("padding", [0, 5])
def test_tables_are_those_of_the_trees(padding):
    trees = [*SHAPES.values(), DraftTree.chain(70)]
    packed = pack(trees, num_rows=sum(tree.num_rows for tree in trees) + padding)
    tables = packed.tables
    assert (tables.num_rows, tables.num_seqs, tables.max_rows) == (packed.num_rows, len(trees), 71)
    for seq, tree in enumerate(trees):
        rows = slice(packed.starts[seq], packed.starts[seq + 1])
        words = tables.ancestors[rows].numpy().view(np.uint32)
        bits = (words[:, :, None] >> np.arange(WORD, dtype=np.uint32) & 1).reshape(tree.num_rows, -1)
        assert np.array_equal(bits[:, : tree.num_rows].astype(bool), tree.ancestors)
        assert not bits[:, tree.num_rows :].any()
        assert tables.parents[rows].tolist() == list(tree.parents)
        assert tables.depth[rows].tolist() == list(tree.depth)
        assert (tables.seq_of_row[rows] == seq).all()
    inert = slice(packed.starts[-1], None)
    assert (tables.parents[inert] == -1).all()
    assert (tables.seq_of_row[inert] == -1).all()
    assert not tables.ancestors[inert].any()
    assert not tables.depth[inert].any()
    assert all(x.dtype == torch.int32 for x in tables if isinstance(x, torch.Tensor))


def test_paths():
    packed = pack([DraftTree.chain(3), DraftTree.from_widths([2, 2])])
    tables = pack_paths(packed, [[], [0, 2, 5]]).tables
    assert tables.lengths.tolist() == [0, 3]
    assert tables.rows[1].tolist() == [4, 6, 9]
