"""Entry points of tree attention on pages, with their checks: for engines that capture their steps."""

import torch

from treewy.errors import ShapeError
from treewy.ops.attention.api import implementation
from treewy.ops.attention.records import Paged, Workspace
from treewy.ops.paths import check_path_shape
from treewy.packed import PathTables, TreeTables
from treewy.shapes import Float, Tensor


def verify_paged(
    q: Float[Tensor, "N HQ E"],
    k: Float[Tensor, "N HK E"],
    v: Float[Tensor, "N HK E"],
    committed: Paged,
    tree: TreeTables,
    *,
    scale: float,
    out: Float[Tensor, "N HQ E"] | None = None,
    scratch: Workspace | None = None,
    backend: str | None = None,
) -> Float[Tensor, "N HQ E"]:
    """Attend from tree rows to committed pages and to their ancestors, themselves included.

    With backend "triton", `out` and `scratch`, a call allocates nothing, asks the device nothing and launches two
    kernels: one captured graph serves every tree, table and length within the buffers' bounds. A row's bits depend on
    its own operands, prefix and tree, and not on the batch, its neighbours, padding or those bounds.

    A draft row whose key or value is not finite spoils the rows that see it, whole, and no other. Rows past
    `tree.cu_rows[-1]` and rows of sequences of length -1 become zero, and nothing is read for them: a call whose
    lengths are all -1 compiles what a step of its shapes needs, and does nothing else.

    Kernels cannot check what lies on the device. They never leave the pools: a length past the table's end counts as the
    end, and a page outside the pool, within a sequence's length, for one inside: the rows of that sequence are then
    wrong. Eager and reference refuse both.

    Args:
        q: Queries, rotated; query head j reads KV head j // (HQ / HK).
        k: Keys of the tree's rows, rotated. They need not be in the pages.
        v: Values of the tree's rows.
        committed: Pools, tables and lengths of the committed places. Read only.
        tree: The trees of `k` and `v`, on the device.
        scale: Factor of the scores.
        out: Where the result goes. Default: a new tensor.
        scratch: What `workspace` gives for at least these bounds. Default: new; eager and reference need none.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit each other.
        CapacityError: `scratch` is too small; a length or page is out of range (eager and reference).
        UnsupportedError: dtypes, head dim or scale that the kernels are not made for.

    Source: eq. 11 of docs/theory.md.
    """
    check_committed(committed, k, v)
    num_rows, num_heads, head_dim = k.shape
    if q.ndim != 3 or q.shape[0] != num_rows or q.shape[2] != head_dim or q.shape[1] % num_heads:
        raise ShapeError(
            f"q must be [{num_rows}, multiple of {num_heads}, {head_dim}]; got {tuple(q.shape)}. "
            "Query head j reads KV head j // (HQ / HK)."
        )
    _check_sequences(committed, tree.num_seqs, "tree")
    if tree.num_rows != num_rows:
        raise ShapeError(f"k must have the tree's {tree.num_rows} rows; got {num_rows}. Pack both from the same batch.")
    out = torch.empty_like(q) if out is None else out
    if out.shape != q.shape:
        raise ShapeError(f"out must be {tuple(q.shape)}, as q is; got {tuple(out.shape)}. Allocate it like q.")
    implementation("attention.verify_paged", backend).verify_paged(q, k, v, committed, tree, scale, out, scratch)
    return out


def workspace(
    num_rows: int, num_heads: int, head_dim: int, max_places: int, *, device: torch.device | str
) -> Workspace:
    """Return the scratch of a `verify_paged` with backend "triton"; it may be shared, and need not be cleared.

    Args:
        num_rows: Rows of the packed axis (N).
        num_heads: Query heads (HQ).
        head_dim: Head dim (E).
        max_places: Places of the longest sequence that the tables can hold.
        device: Where the operands live.
    """
    kernels = implementation("attention.workspace", "triton")
    return kernels.workspace(num_rows, num_heads, head_dim, max_places, device)


def commit_paged(
    committed: Paged,
    k: Float[Tensor, "N HK E"],
    v: Float[Tensor, "N HK E"],
    path: PathTables,
    *,
    backend: str | None = None,
) -> None:
    """Write each accepted path's keys and values to consecutive places after the committed ones.

    Lengths stay as they are: they are the caller's, and the same for all layers. An empty path and a sequence of length
    -1 change nothing. Kernels write nothing for a place past the table's end, on a page outside the pool or of a row
    that does not exist; eager and reference refuse.

    Raises:
        ShapeError: operands do not fit each other; a path has a row that k lacks (eager and reference).
        CapacityError: a path passes the end of its table (eager and reference).
    """
    check_committed(committed, k, v)
    check_path_shape(path, committed.lengths.shape[0])
    implementation("attention.commit_paged", backend).commit_paged(committed, k, v, path)


def compact_paged(committed: Paged, tree: TreeTables, path: PathTables, *, backend: str | None = None) -> None:
    """Move each accepted path's keys and values within the pages, where an engine wrote the whole tree already.

    Local row i of a tree lies at place length + i. The path's rows move to consecutive places from the length on, as
    `commit_paged` would have written them; what lies behind them is left as it is, and is committed no more.

    Raises:
        ShapeError: operands do not fit each other; a path has a row that its tree lacks (eager and reference).
        CapacityError: a tree passes the end of its table (eager and reference).
    """
    _check_pools(committed)
    _check_sequences(committed, tree.num_seqs, "tree")
    check_path_shape(path, committed.lengths.shape[0])
    implementation("attention.compact_paged", backend).compact_paged(committed, tree, path)


def check_committed(committed: Paged, k: Tensor, v: Tensor) -> None:
    """Check that rows fit the pages, and tables the lengths.

    Raises:
        ShapeError: they do not.
    """
    _check_pools(committed)
    if k.ndim != 3 or k.shape != v.shape or k.shape[1:] != committed.keys.shape[2:]:
        raise ShapeError(
            f"k and v must be [N, {', '.join(map(str, committed.keys.shape[2:]))}] for these pages; got "
            f"{tuple(k.shape)} and {tuple(v.shape)}. One row per row of the tree, with the pools' heads."
        )


def _check_pools(committed: Paged) -> None:
    keys, values, table, lengths = committed
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ShapeError(
            f"Pools must be [pages, places, heads, head dim], keys as values; got {tuple(keys.shape)} and "
            f"{tuple(values.shape)}. A pool of another order of axes can be handed over as a transposed view."
        )
    if table.ndim != 2 or tuple(lengths.shape) != (table.shape[0],):
        raise ShapeError(
            f"block_tables must be [B, columns] and lengths [B]; got {tuple(table.shape)} and {tuple(lengths.shape)}. "
            "One row and one length per sequence."
        )


def _check_sequences(committed: Paged, given: int, name: str) -> None:
    if given != committed.lengths.shape[0]:
        raise ShapeError(
            f"The {name} must have the {committed.lengths.shape[0]} sequences of the tables; got {given}. "
            "Pad the tables with length -1 or the batch with sequences without rows."
        )
