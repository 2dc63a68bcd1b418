"""Buffers of one captured graph: tables of trees and paths, and slots, refilled in place before each replay."""

from collections.abc import Sequence

import torch

from treewy.packed import PackedTree, PathTables, TreeTables, pack, pack_paths
from treewy.tree import DraftTree


class Bucket:
    """Tables for at most `num_seqs` trees of at most `num_rows` rows together, of at most `max_rows` each.

    Everything past what the last `fill` brought is inert: sequences have no rows, no path and slot -1.
    """

    def __init__(self, num_seqs: int, num_rows: int, *, max_rows: int, device: str) -> None:
        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tables = TreeTables(
            parents=table(num_rows) - 1,
            cu_rows=table(num_seqs + 1),
            seq_of_row=table(num_rows) - 1,
            depth=table(num_rows),
            ancestors=table(num_rows, -(-max_rows // 32)),
            max_rows=max_rows,
        )
        self.paths = PathTables(table(num_seqs, max_rows), table(num_seqs))
        self.slots = torch.full((num_seqs,), -1, device=device)

    def fill(
        self, trees: Sequence[DraftTree], slots: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> PackedTree:
        """Bring in other trees and return them as the host knows them."""
        device, num_rows = self.slots.device, self.tables.num_rows
        tree = pack(trees, num_rows=num_rows, device=device)
        new = tree.tables
        for mine, theirs in zip(self.tables[:5], new[:5], strict=True):
            mine.fill_(0)
            mine[: len(theirs), ...][..., : theirs.shape[-1]] = theirs
        self.tables.cu_rows[len(trees) :] = new.cu_rows[-1]
        self.slots.fill_(-1)[: len(slots)] = torch.tensor(slots, dtype=torch.int64, device=device)
        self.paths.lengths.fill_(0)
        self.paths.rows.fill_(2**30)
        if paths is not None:
            rows, lengths = pack_paths(tree, paths).tables
            self.paths.rows[: len(paths), : rows.shape[1]] = rows
            self.paths.lengths[: len(paths)] = lengths
        return tree
