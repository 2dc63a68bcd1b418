"""Packing: trees of different shapes laid on one row axis, and accepted paths on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from treewy.errors import TreeError
from treewy.shapes import Bool, Int, Tensor, lasting
from treewy.tree import DraftTree, topology

Shapes = tuple[tuple[int, ...], ...]

# Ancestor bits come in words of this many.
WORD = 32


class TreeTables(NamedTuple):
    """What kernels know of a batch of trees: device tensors only, so that one captured graph serves every tree.

    Nothing about the trees is on the host but the bounds of the buffers: B sequences, N rows, `max_rows` rows per tree.
    A sequence may have no rows. Rows past `cu_rows[-1]` are inert: parent -1, depth 0, sequence -1, no ancestors.

    Attributes:
        parents: Parent of each row, local to its tree, -1 for roots and inert rows.
        cu_rows: Row boundaries of the sequences.
        seq_of_row: Sequence of each row, -1 for inert rows.
        depth: Depth of each row.
        ancestors: Bit i of word w: local row `WORD` w + i is the row or one of its ancestors.
        max_rows: Rows of the largest tree that fits (T): a bound, not the trees' own size.
    """

    parents: Int[Tensor, "N"]
    cu_rows: Int[Tensor, "B1"]
    seq_of_row: Int[Tensor, "N"]
    depth: Int[Tensor, "N"]
    ancestors: Int[Tensor, "N words"]
    max_rows: int

    @property
    def num_rows(self) -> int:
        """Rows of the packed axis (N)."""
        return self.parents.shape[0]

    @property
    def num_seqs(self) -> int:
        """Sequences (B)."""
        return self.cu_rows.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self.parents.device

    def first(self, num_seqs: int, num_rows: int) -> "TreeTables":
        """Return the tables of the first sequences and rows, as views."""
        return TreeTables(
            self.parents[:num_rows],
            self.cu_rows[: num_seqs + 1],
            self.seq_of_row[:num_rows],
            self.depth[:num_rows],
            self.ancestors[:num_rows],
            self.max_rows,
        )


class PathTables(NamedTuple):
    """The accepted path of each sequence, on the device; an empty path leaves its sequence as it was.

    Attributes:
        rows: Packed row of each accepted node, in path order, left aligned; never read past the length.
        lengths: Accepted rows of each sequence.
    """

    rows: Int[Tensor, "B P"]
    lengths: Int[Tensor, "B"]


@dataclass(frozen=True, eq=False)
class PackedTree:
    """The trees of B sequences, rows end to end; rows past `cu_rows[-1]` are inert padding.

    Built by `pack`. `T` is the row count of the largest tree; dense tables are padded to it. An inert row has parent
    -1, depth 0 and no sequence: ops give it zeros and read nothing for it.
    """

    shapes: Shapes
    num_rows: int
    device: torch.device

    @property
    def num_seqs(self) -> int:
        """Sequences (B)."""
        return len(self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        return tuple(len(parents) for parents in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First packed row of each sequence, and the end of the last: B + 1 numbers on the host."""
        return (0, *np.cumsum(self.sizes, dtype=np.int64).tolist())

    @cached_property
    def max_size(self) -> int:
        """Rows of the largest tree (T); 0 for an empty batch."""
        return max(self.sizes, default=0)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest row of any tree (D)."""
        return max((int(topology(parents).depth.max()) for parents in self.shapes), default=0)

    @cached_property
    def cu_rows(self) -> Int[Tensor, "B1"]:
        """Row boundaries, on the device."""
        return self._tensor(np.asarray(self.starts))

    @cached_property
    def parents(self) -> Int[Tensor, "N"]:
        """Parent of each row, local to its tree, -1 for roots and inert rows."""
        return self._tensor(self._packed(lambda parents: parents, fill=-1))

    @cached_property
    def depth(self) -> Int[Tensor, "N"]:
        """Depth of each row."""
        return self._tensor(self._packed(lambda parents: topology(parents).depth, fill=0))

    @cached_property
    def seq_of_row(self) -> Int[Tensor, "N"]:
        """Sequence of each row, -1 for inert rows."""
        owners = np.full(self.num_rows, -1, dtype=np.int64)
        owners[: self.starts[-1]] = np.repeat(np.arange(self.num_seqs), self.sizes)
        return self._tensor(owners)

    @cached_property
    def rows(self) -> Int[Tensor, "B T"]:
        """Packed row of dense place [b, t]; N where there is none."""
        dense = np.full((self.num_seqs, self.max_size), self.num_rows, dtype=np.int64)
        for seq, (start, size) in enumerate(zip(self.starts, self.sizes, strict=False)):
            dense[seq, :size] = np.arange(start, start + size)
        return self._tensor(dense)

    @cached_property
    def places(self) -> Int[Tensor, "N"]:
        """Dense place b * T + t of each packed row; B * T for inert rows."""
        flat = np.full(self.num_rows, self.num_seqs * self.max_size, dtype=np.int64)
        for seq, (start, size) in enumerate(zip(self.starts, self.sizes, strict=False)):
            flat[start : start + size] = seq * self.max_size + np.arange(size)
        return self._tensor(flat)

    @cached_property
    def ancestors(self) -> Bool[Tensor, "B T T"]:
        """[b, t, i]: i is t or one of its ancestors. False on padding."""
        dense = np.zeros((self.num_seqs, self.max_size, self.max_size), dtype=bool)
        for seq, parents in enumerate(self.shapes):
            dense[seq, : len(parents), : len(parents)] = topology(parents).ancestors
        return self._tensor(dense)

    @cached_property
    def strict_ancestors(self) -> Bool[Tensor, "B T T"]:
        """`ancestors` without the diagonal."""
        return self._tensor(self.ancestors.cpu().numpy() & ~np.eye(self.max_size, dtype=bool))

    @cached_property
    def depth_dense(self) -> Int[Tensor, "B T"]:
        """Depth at dense places; padding lies deeper than any level, so that no level ever admits it."""
        dense = np.full((self.num_seqs, self.max_size), self.max_depth + 1, dtype=np.int64)
        for seq, parents in enumerate(self.shapes):
            dense[seq, : len(parents)] = topology(parents).depth
        return self._tensor(dense)

    @cached_property
    def tables(self) -> TreeTables:
        """The same trees as kernels take them, int32; `max_rows` is the size of the largest."""
        tables = (self.parents, self.cu_rows, self.seq_of_row, self.depth)
        parents, cu_rows, seq_of_row, depth = (x.to(torch.int32) for x in tables)
        return TreeTables(parents, cu_rows, seq_of_row, depth, self._ancestor_words(), self.max_size)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all trees have one size and nothing is padding: dense and packed are then views of each other."""
        return self.num_rows == self.starts[-1] == self.num_seqs * self.max_size

    def to_dense(self, packed: Tensor) -> Tensor:
        """Bring packed rows [N, ...] to dense places [B, T, ...]; padding is 0."""
        if self.is_uniform:
            return packed.reshape(self.num_seqs, self.max_size, *packed.shape[1:])
        zero = packed.new_zeros(1, *packed.shape[1:])
        return torch.cat([packed, zero])[self.rows]

    def to_packed(self, dense: Tensor) -> Tensor:
        """Bring dense places [B, T, ...] to packed rows [N, ...]; inert rows are 0."""
        flat = dense.reshape(-1, *dense.shape[2:])
        if self.is_uniform:
            return flat
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.places]

    def nearest_ancestors(self, width: int) -> Int[Tensor, "N W"]:
        """Return, for each row, where its `width` newest inputs lie, oldest first, itself last.

        Places count over the N packed rows, then over B windows of `width` - 1 committed inputs each. Inert rows point
        at themselves.
        """
        return _nearest_ancestors(self, width)

    def _ancestor_words(self) -> Int[Tensor, "N words"]:
        words = np.zeros((self.num_rows, -(-self.max_size // WORD)), dtype=np.uint32)
        for start, parents in zip(self.starts, self.shapes, strict=False):
            bits = topology(parents).ancestors
            for place in range(len(parents)):
                word, bit = divmod(place, WORD)
                words[start : start + len(parents), word] |= bits[:, place].astype(np.uint32) << bit
        return self._tensor(words.view(np.int32))

    def _packed(self, table: Callable[[tuple[int, ...]], Sequence[int] | np.ndarray], fill: int) -> np.ndarray:
        packed = np.full(self.num_rows, fill, dtype=np.int64)
        for start, parents in zip(self.starts, self.shapes, strict=False):
            packed[start : start + len(parents)] = table(parents)
        return packed

    @lasting
    def _tensor(self, table: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(table)).to(self.device)


@dataclass(frozen=True, eq=False)
class PackedPath:
    """The accepted path of each sequence of a `PackedTree`; an empty path leaves its sequence as it was.

    Built by `pack_paths`. Rows are packed rows, in path order, left aligned.
    """

    tree: PackedTree
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Accepted rows of each sequence."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def is_full(self) -> bool:
        """Whether every sequence accepted something."""
        return all(self.lengths)

    @cached_property
    def is_even(self) -> bool:
        """Whether all paths that are not empty have one length."""
        return len({length for length in self.lengths if length}) <= 1

    @cached_property
    def rows(self) -> Int[Tensor, "B P"]:
        """Packed row of each accepted node; N (one past the rows) on padding."""
        dense = np.full((len(self.paths), max(self.lengths, default=0)), self.tree.num_rows, dtype=np.int64)
        for seq, path in enumerate(self.paths):
            dense[seq, : len(path)] = np.asarray(path, dtype=np.int64) + self.tree.starts[seq]
        return torch.from_numpy(dense).to(self.tree.device)

    @cached_property
    def valid(self) -> Bool[Tensor, "B P"]:
        """Where `rows` holds an accepted node."""
        return self.rows < self.tree.num_rows

    @cached_property
    def active(self) -> Int[Tensor, "A"]:
        """Sequences whose path is not empty."""
        return torch.tensor(
            [i for i, path in enumerate(self.paths) if path], dtype=torch.int64, device=self.tree.device
        )

    @cached_property
    def active_rows(self) -> Int[Tensor, "A P"]:
        """`rows` of active sequences."""
        return self.rows if self.is_full else self.rows[self.active]

    @cached_property
    def last_rows(self) -> Int[Tensor, "A"]:
        """Packed row of the last accepted node of each active sequence."""
        last = [path[-1] + self.tree.starts[seq] for seq, path in enumerate(self.paths) if path]
        return torch.tensor(last, dtype=torch.int64, device=self.tree.device)

    @cached_property
    def packed_rows(self) -> Int[Tensor, "R"]:
        """All accepted packed rows end to end, sequence by sequence."""
        flat = [row + self.tree.starts[seq] for seq, path in enumerate(self.paths) for row in path]
        return torch.tensor(flat, dtype=torch.int64, device=self.tree.device)

    @cached_property
    def tables(self) -> PathTables:
        """The same paths as kernels take them, int32."""
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.tree.device)
        return PathTables(self.rows.to(torch.int32), lengths)

    def newest_inputs(self, width: int) -> Int[Tensor, "A W1"]:
        """Return, for each active sequence, where its new window's inputs lie, oldest first.

        Places count as in `PackedTree.nearest_ancestors`.
        """
        window = width - 1
        table = np.empty((len(self.active), window), dtype=np.int64)
        active = [seq for seq, path in enumerate(self.paths) if path]
        for place, seq in enumerate(active):
            old = self.tree.num_rows + seq * window + np.arange(window)
            new = np.asarray(self.paths[seq], dtype=np.int64) + self.tree.starts[seq]
            table[place] = np.concatenate([old, new])[len(new) :]
        return torch.from_numpy(table).to(self.tree.device)


def pack(trees: Sequence[DraftTree], *, num_rows: int | None = None, device: torch.device | str = "cpu") -> PackedTree:
    """Pack one tree per sequence, shapes as they come.

    Args:
        trees: One tree per sequence; tokens are ignored.
        num_rows: Rows of the packed axis; rows past the trees' own are inert padding. Default: no padding.
        device: Where the tables live.

    Raises:
        TreeError: the trees do not fit into `num_rows`.
    """
    total = sum(tree.num_rows for tree in trees)
    if num_rows is not None and num_rows < total:
        raise TreeError(
            f"Packed rows must hold every tree; {total} rows do not fit num_rows={num_rows}. Raise num_rows."
        )
    return _cached_pack(tuple(tree.parents for tree in trees), total if num_rows is None else num_rows, str(device))


@lru_cache(maxsize=512)
def _cached_pack(shapes: Shapes, num_rows: int, device: str) -> PackedTree:
    return PackedTree(shapes, num_rows, torch.device(device))


def pack_paths(tree: PackedTree, paths: Sequence[Sequence[int]]) -> PackedPath:
    """Check and pack one accepted path per sequence; rows are local to each tree.

    Raises:
        TreeError: a path does not start at its root, or leaves the tree's edges.
    """
    if len(paths) != tree.num_seqs:
        raise TreeError(f"There must be one path per sequence; got {len(paths)} paths for {tree.num_seqs} sequences.")
    for seq, (path, parents) in enumerate(zip(paths, tree.shapes, strict=True)):
        before = -1
        for row in path:
            if not 0 <= row < len(parents) or parents[row] != before:
                raise TreeError(
                    f"An accepted path must follow the tree from its root; in sequence {seq} row {row} follows row "
                    f"{before} in path {list(path)}. Pass tree.path(node)."
                )
            before = row
    return PackedPath(tree, tuple(tuple(int(row) for row in path) for path in paths))


@lru_cache(maxsize=512)
@lasting
def _nearest_ancestors(tree: PackedTree, width: int) -> Int[Tensor, "N W"]:
    window = width - 1
    table = np.tile(np.arange(tree.num_rows, dtype=np.int64)[:, None], (1, width))
    for seq, (start, parents) in enumerate(zip(tree.starts, tree.shapes, strict=False)):
        oldest_first = tree.num_rows + seq * window + np.arange(window)
        local = np.empty((len(parents), width), dtype=np.int64)
        for row, parent in enumerate(parents):
            before = oldest_first if parent < 0 else local[parent, 1:]
            local[row, :window], local[row, window] = before, start + row
        table[start : start + len(parents)] = local
    return torch.from_numpy(table).to(tree.device)
