"""Where a step's draft trees lie in vLLM's batch, and what that means for whatever tells rows by their place.

vLLM takes a request's rows for consecutive tokens. Of a tree only their places in the cache are: row i of a tree lies i
places behind the root, at the position that its depth says, and sees its ancestors. After acceptance the path's rows move
to where a chain's would be.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from treewy.packed import PathTables, TreeTables
from treewy.shapes import Int, Tensor
from treewy.tree import DraftTree
from treewy.vllm_plugin.step import Drafted, Tables, sent


class Attended(NamedTuple):
    """What attention needs to know of a step's trees.

    Attributes:
        tree: The trees.
        lengths: Places before each root.
        table: Pages of each sequence.
        rows: The batch's row of each row of the trees; None where they are one and the same.
    """

    tree: TreeTables
    lengths: Int[Tensor, "B"]
    table: Int[Tensor, "B columns"]
    rows: Int[Tensor, "N"] | None


class Accepted(NamedTuple):
    """What the step accepted of each tree.

    Attributes:
        starts: The batch's row of each root.
        local: Rows of each path, local to its tree, the root first.
        lengths: Rows of each path.
    """

    starts: Int[Tensor, "B"]
    local: Int[Tensor, "B P"]
    lengths: Int[Tensor, "B"]


class Trees:
    """The trees of the running step.

    Args:
        tree: What each request drafts.
        num_requests: Requests that run at once (R).
        device: Of the engine.

    Attributes:
        path: Accepted rows of each request of the batch, local to its tree: the sampler's; None before it ran.
        accepted: The same of the trees alone, for the drafter; None where the step had none.
        of_layer: What each attention layer attends to in the running step.
        batch: The batch's place of each tree; None where they are one and the same.
    """

    def __init__(self, tree: DraftTree, num_requests: int, device: torch.device | str) -> None:
        """Make the buffers that captured graphs read."""
        self.tree, self.max_path = tree, tree.max_depth + 1
        self._shift = np.asarray(tree.depth - np.arange(tree.num_rows), dtype=np.int64)
        self._full_shift = torch.from_numpy(np.tile(self._shift, num_requests)).to(device)
        self._lengths = torch.zeros(num_requests, dtype=torch.int32, device=device)
        self._tables: Tables | None = None
        self._rows: Int[Tensor, "N"] | None = None
        self.batch: Int[Tensor, "B"] | None = None
        self._shifts = self._full_shift[:0]
        self._starts: Int[Tensor, "B"] = self._lengths[:0]
        self.path: Int[Tensor, "X P"] | None = None
        self.accepted: Accepted | None = None
        self.of_layer: dict[str, Attended] = {}

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What is written once and read ever after."""
        return {"full_shift": self._full_shift}

    def begin(self, drafted: Drafted, tables: Tables, batch: Any) -> None:
        """Note where the trees of a step lie.

        Args:
            drafted: The requests that verify.
            tables: Tables of the step.
            batch: vLLM's batch.
        """
        count, num_seqs = len(drafted.requests), tables.tree.num_seqs
        self._tables, self.path, self.accepted, self.of_layer = tables, None, None, {}
        lengths, device = self._lengths[:num_seqs], self._lengths.device
        if count == batch.num_reqs:
            self._rows, self.batch, self._starts = None, None, tables.tree.cu_rows[:count]
            ends = batch.seq_lens[:num_seqs]
        else:
            starts = np.asarray(batch.query_start_loc_np)[drafted.batch]
            within = np.arange(drafted.num_rows) - np.repeat(np.cumsum(drafted.sizes) - drafted.sizes, drafted.sizes)
            self._rows = sent(np.repeat(starts, drafted.sizes) + within, device)
            self.batch = sent(drafted.batch.astype(np.int64), device)
            self._starts = sent(starts.astype(np.int32), device)
            ends = batch.seq_lens[self.batch]
        sizes = tables.tree.cu_rows[1:] - tables.tree.cu_rows[:-1]
        torch.sub(ends, sizes, out=lengths).clamp_(min=0)
        self._shifts = self._shift_of(drafted)

    def shift_positions(self, positions: Int[Tensor, "... X"]) -> None:
        """Set rows from where they lie to the positions that their depths say, in place."""
        self._add(positions, self._shifts)

    def unshift_positions(self, positions: Int[Tensor, "... X"]) -> None:
        """Take `shift_positions` back."""
        self._add(positions, -self._shifts)

    def attended(self, block_table: Int[Tensor, "X columns"], layers: Sequence[str] = ()) -> Attended | None:
        """Return what attention needs, None in a step without trees.

        Args:
            block_table: Pages of each request of the batch.
            layers: The layers that they are of, for `of_layer`.
        """
        if self._tables is None or not self._tables.tree.num_rows:
            return None
        num_seqs = self._tables.tree.num_seqs
        table = block_table[:num_seqs] if self.batch is None else block_table[self.batch]
        attended = Attended(self._tables.tree, self._lengths[:num_seqs], table, self._rows)
        self.of_layer.update(dict.fromkeys(layers, attended))
        return attended

    def finish(self, path: PathTables | None) -> None:
        """Note what was accepted, for the caches and the drafter.

        Args:
            path: Accepted rows, packed: `Step.finish` returns them.
        """
        if path is None or self._tables is None:
            return
        count = len(path.lengths)
        local = path.rows - self._tables.tree.cu_rows[:count, None]
        self.accepted = Accepted(self._starts, local, path.lengths)

    def gather_paths(self, *per_row: Tensor) -> None:
        """Move what belongs to the paths' rows to the front of each request's rows, in place, as the drafter expects it."""
        if self.accepted is None:
            return
        starts, local, lengths = self.accepted
        along = torch.arange(local.shape[1], dtype=local.dtype, device=local.device)
        # Past a path's end the root stands in, which stays where it is.
        live = along < lengths[:, None]
        here, there = ((starts[:, None] + torch.where(live, x, 0)).long().flatten() for x in (along, local))
        for rows in per_row:
            rows[here] = rows[there]

    def _shift_of(self, drafted: Drafted) -> Int[Tensor, "N"]:
        if self._rows is None and (drafted.sizes == self.tree.num_rows).all():
            return self._full_shift[: drafted.num_rows]
        within = np.concatenate([self._shift[:size] for size in drafted.sizes] or [self._shift[:0]])
        return sent(within, self._full_shift.device)

    def _add(self, positions: Tensor, shift: Tensor) -> None:
        if not len(shift):
            return
        if self._rows is None:
            positions[..., : len(shift)] += shift
        else:
            positions.index_add_(-1, self._rows, shift.to(positions.dtype).expand(*positions.shape[:-1], -1))
