"""Entry points of tree tables, with their checks."""

from types import ModuleType

import torch

from treewy.errors import ShapeError
from treewy.ops.dispatch import Implementations, select
from treewy.packed import WORD, PathTables, TreeTables
from treewy.shapes import Int, Tensor, lasting

# What may be wrong with a sequence, as bits of its word in `faults`.
FAULT_BOUNDS, FAULT_SIZE, FAULT_PARENT = 1, 2, 4


@lasting
def empty(num_seqs: int, num_rows: int, max_rows: int, device: torch.device | str = "cpu") -> TreeTables:
    """Return tables of no trees, to be filled by `tables(..., out=)` before each replay of a graph that reads them.

    Args:
        num_seqs: Sequences (B).
        num_rows: Packed rows (N).
        max_rows: Rows of the largest tree that fits (T).
        device: Where the tables live.
    """
    if min(num_seqs, num_rows, max_rows) < 0:
        raise ShapeError(
            f"Tables must have at least 0 of everything; got num_seqs={num_seqs}, num_rows={num_rows}, "
            f"max_rows={max_rows}. Pass the bounds of the largest batch."
        )
    options = {"dtype": torch.int32, "device": device}
    parents, seq_of_row = (torch.full((num_rows,), -1, **options) for _ in range(2))
    cu_rows, depth = torch.zeros(num_seqs + 1, **options), torch.zeros(num_rows, **options)
    words = torch.zeros(num_rows, -(-max_rows // WORD), **options)
    return TreeTables(parents, cu_rows, seq_of_row, depth, words, max_rows)


def tables(
    parents: Int[Tensor, "N"],
    cu_rows: Int[Tensor, "B1"],
    *,
    max_rows: int,
    out: TreeTables | None = None,
    faults: Int[Tensor, "B"] | None = None,
    backend: str | None = None,
) -> TreeTables:
    """Make the tables of a batch of trees from parents and boundaries, without a look at them from the host.

    For trees that are right these are `PackedTree.tables`. What is wrong cannot raise; it is made harmless:

    - A row whose parent is no earlier row of its tree (or, for a tree's first row, is not -1) is inert, and so are its
      descendants: parent -1, depth 0, sequence -1, no ancestors, not even itself. Nothing leads to such a row.
    - Rows from place `max_rows` of a tree on are inert.
    - Boundaries that fall or leave 0..N are raised to the largest before them and cut to 0..N; rows between no two
      boundaries are inert.

    Args:
        parents: Parent of each row, local to its tree, -1 for roots; rows past the last boundary are never read.
        cu_rows: Row boundaries of the sequences.
        max_rows: Rows of the largest tree that fits (T).
        out: Where to write, as `empty` returns it; `parents` and `cu_rows` may be its own. Default: new tables.
        faults: Where to write what was wrong with each sequence, contiguous int32: 0, or a sum of `FAULT_BOUNDS` (boundaries were
            moved), `FAULT_SIZE` (more than `max_rows` rows) and `FAULT_PARENT` (a row has no way to its root).
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit each other.
        UnsupportedError: the kernel has no room for so many rows per tree.
    """
    if cu_rows.shape[0] == 0:
        raise ShapeError("cu_rows must hold B + 1 boundaries; got none. Pass [0] for a batch without sequences.")
    num_seqs, num_rows = cu_rows.shape[0] - 1, parents.shape[0]
    if out is None:
        out = empty(num_seqs, num_rows, max_rows, parents.device)
    _check_out(out, num_seqs, num_rows, max_rows)
    if faults is not None and tuple(faults.shape) != (num_seqs,):
        raise ShapeError(
            f"faults must be [{num_seqs}], one word per sequence; got {tuple(faults.shape)}. Make it for this batch size."
        )
    if faults is not None:
        check_written(faults=faults)
    _implementation("tree.tables", backend).tables(parents, cu_rows, out, faults)
    return out


def paths(
    tables: TreeTables,
    nodes: Int[Tensor, "B"],
    *,
    max_path: int | None = None,
    out: PathTables | None = None,
    backend: str | None = None,
) -> PathTables:
    """Return the root path to one row of each tree.

    Args:
        tables: The trees.
        nodes: Row of each tree, local to it. -1, and what is no row of the tree, gives an empty path.
        max_path: Rows that a path has room for (P); default: `max_rows`. Of longer paths the first P rows are given.
        out: Where to write; its shape stands in for `max_path`.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit each other.
    """
    num_seqs = tables.num_seqs
    if tuple(nodes.shape) != (num_seqs,):
        raise ShapeError(f"nodes must be [{num_seqs}], one row per sequence; got {tuple(nodes.shape)}.")
    if out is None:
        out = empty_paths(num_seqs, tables.max_rows if max_path is None else max_path, tables.device)
    check_paths(out, num_seqs)
    _implementation("tree.paths", backend).paths(tables, nodes, out)
    return out


@lasting
def empty_paths(num_seqs: int, max_path: int, device: torch.device | str) -> PathTables:
    """Return empty paths with room for `max_path` rows each."""
    rows = torch.zeros(num_seqs, max_path, dtype=torch.int32, device=device)
    return PathTables(rows, torch.zeros(num_seqs, dtype=torch.int32, device=device))


def check_paths(path: PathTables, num_seqs: int) -> None:
    """Check that paths to be written fit the batch and are laid out as kernels write them.

    Raises:
        ShapeError: they do not.
    """
    if path.rows.shape[0] != num_seqs or tuple(path.lengths.shape) != (num_seqs,):
        raise ShapeError(
            f"Paths must have {num_seqs} sequences; got rows {tuple(path.rows.shape)} and lengths "
            f"{tuple(path.lengths.shape)}. Make them for this batch size."
        )
    check_written(rows=path.rows, lengths=path.lengths)


def check_written(**buffers: Tensor) -> None:
    """Check that buffers to be written are int32 and contiguous.

    Raises:
        ShapeError: one is not.
    """
    for name, buffer in buffers.items():
        if buffer.dtype != torch.int32 or not buffer.is_contiguous():
            raise ShapeError(
                f"{name} must be contiguous int32 to be written; got {buffer.dtype}, strides {buffer.stride()}. "
                "Make it so, or use the op's own empty(...)."
            )


def _check_out(out: TreeTables, num_seqs: int, num_rows: int, max_rows: int) -> None:
    words = (num_rows, -(-max_rows // WORD))
    shapes = (out.num_seqs, out.num_rows, out.max_rows, tuple(out.ancestors.shape))
    if shapes != (num_seqs, num_rows, max_rows, words):
        raise ShapeError(
            f"out must hold {num_seqs} sequences, {num_rows} rows, max_rows={max_rows} and words {words}; got "
            f"{shapes}. Use empty({num_seqs}, {num_rows}, {max_rows})."
        )
    check_written(**{name: getattr(out, name) for name in TreeTables._fields if name != "max_rows"})


def _implementation(op: str, backend: str | None) -> ModuleType:
    from treewy.ops.tree import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.tree.kernels"), backend)
