"""Entry points of tree attention, with their checks."""

from collections.abc import Sequence

from treewy.errors import CapacityError, ShapeError
from treewy.ops.dispatch import Implementations, select
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Float, Int, Tensor


def verify(
    q: Float[Tensor, "Q HQ E"],
    k: Float[Tensor, "N HK E"],
    v: Float[Tensor, "N HK E"],
    keys: Float[Tensor, "S M HK E"],
    values: Float[Tensor, "S M HK E"],
    slots: Int[Tensor, "B"],
    lengths: Sequence[int],
    tree: PackedTree,
    *,
    scale: float,
    first_query: Sequence[int] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "Q HQ E"]:
    """Attend from tree rows to the committed prefix and to their ancestors, themselves included.

    The prefix part needs no mask, the tree part T x T bits; the two merge by log-sum-exp, so no mask ever has the
    context's length.

    Args:
        q: Queries, rotated; query head j reads KV head j // (HQ / HK).
        k: Keys of the tree's rows, rotated.
        v: Values of the tree's rows.
        keys: Pool of committed keys. Read only.
        values: Pool of committed values. Read only.
        slots: Pool slot of each sequence; -1 makes its rows inert.
        lengths: Committed places of each sequence, on the host.
        tree: The packed trees of `k` and `v`.
        scale: Factor of the scores.
        first_query: Row of each tree at which its queries start, when only the last rows of each tree ask.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit the tree.
        CapacityError: a length passes the end of the pool.

    Source: eq. 11 of docs/theory.md.
    """
    first = [0] * tree.num_seqs if first_query is None else list(first_query)
    _check(q, k, v, keys, values, slots, lengths, tree, first)
    return implementation("attention.verify", backend).verify(q, k, v, keys, values, slots, lengths, tree, scale, first)


def commit(
    keys: Float[Tensor, "S M HK E"],
    values: Float[Tensor, "S M HK E"],
    slots: Int[Tensor, "B"],
    lengths: Sequence[int],
    k: Float[Tensor, "N HK E"],
    v: Float[Tensor, "N HK E"],
    path: PackedPath,
    *,
    backend: str | None = None,
) -> None:
    """Write each accepted path's keys and values to consecutive places after the committed ones.

    Raises:
        ShapeError: operands do not fit the tree.
        CapacityError: a path passes the end of the pool.
    """
    _check_rows(k, v, keys, values, slots, lengths, path.tree)
    for seq, (length, added) in enumerate(zip(lengths, path.lengths, strict=True)):
        if length + added > keys.shape[1]:
            raise CapacityError(
                f"Committed places must fit the pool's {keys.shape[1]}; sequence {seq} needs {length} + {added}. "
                "Grow the pool before the step."
            )
    implementation("attention.commit", backend).commit(keys, values, slots, lengths, k, v, path)


def implementation(op: str, backend: str | None):
    """Return the sibling that runs `op`."""
    from treewy.ops.attention import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.attention.kernels"), backend)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Sequence[int],
    tree: PackedTree,
    first: list[int],
) -> None:
    _check_rows(k, v, keys, values, slots, lengths, tree)
    fits = len(first) == tree.num_seqs and all(0 <= row <= size for row, size in zip(first, tree.sizes, strict=True))
    if not fits:
        raise ShapeError(
            f"first_query must hold one row of each tree, or its size; got {first} for trees of {list(tree.sizes)} "
            "rows. Leave it out to ask from every row."
        )
    num_queries = sum(size - start for size, start in zip(tree.sizes, first, strict=True))
    num_queries += tree.num_rows - tree.starts[-1]  # inert rows ask too, and get zeros
    if q.ndim != 3 or q.shape[0] != num_queries or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"q must be [{num_queries}, multiple of {k.shape[1]}, {k.shape[2]}]; got {tuple(q.shape)}. "
            "Query head j reads KV head j // (HQ / HK)."
        )


def _check_rows(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Sequence[int], tree: PackedTree
) -> None:
    kv_shape = (tree.num_rows, *keys.shape[2:])
    if k.shape != kv_shape or v.shape != kv_shape or keys.shape != values.shape:
        raise ShapeError(
            f"k and v must be {kv_shape} for this tree and pool; got k {tuple(k.shape)}, v {tuple(v.shape)}, pools "
            f"{tuple(keys.shape)} and {tuple(values.shape)}. Pack operands and tree from the same batch."
        )
    if tuple(slots.shape) != (tree.num_seqs,) or len(lengths) != tree.num_seqs:
        raise ShapeError(
            f"slots and lengths must have {tree.num_seqs} entries; got {tuple(slots.shape)} and {len(lengths)}. "
            "One per sequence."
        )
    if max(lengths, default=0) > keys.shape[1] or min(lengths, default=0) < 0:
        raise CapacityError(f"Every length must lie in 0..{keys.shape[1]}; got {list(lengths)}. Grow the pool first.")
