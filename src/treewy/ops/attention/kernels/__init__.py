"""Tree attention and its commits in Triton: nothing of trees, paths or lengths is known on the host.

`verify_paged` runs two kernels: the parts of each row's softmax, which are chunks of its prefix and, with the first, its tree,
then their merge. The calls on plain pools are the same kernels on one page per slot, with lengths brought from the host.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from treewy.errors import CapacityError, UnsupportedError
from treewy.ops.attention.kernels import geometry as shapes
from treewy.ops.attention.kernels.merge import merge_parts_kernel
from treewy.ops.attention.kernels.moves import commit_rows_kernel, compact_rows_kernel
from treewy.ops.attention.kernels.parts import attend_parts_kernel
from treewy.ops.attention.records import Paged, Workspace
from treewy.ops.launch import launch, refuse_interpreted_bfloat16
from treewy.ops.slots import INERT, check_slots
from treewy.ops.tree.api import empty as empty_trees
from treewy.ops.tree.api import empty_paths
from treewy.ops.warmup import Facts
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.shapes import Tensor

# Parts that one step of the merge takes.
MERGED_AT_ONCE = 8

# Rows that a commit in place reads before it writes them.
MOVED_AT_ONCE = 16


class _Asking(NamedTuple):
    """Which rows ask: the last of each tree, from `cu[b]` to `cu[b + 1]` of q."""

    cu: Tensor
    seq: Tensor


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Sequence[int],
    tree: PackedTree,
    scale: float,
    first: list[int],
) -> Tensor:
    """See `api.verify`."""
    committed = _whole_slots(keys, values, slots, lengths)
    out = torch.empty_like(q)
    _attend(q, k, v, committed, tree.tables, _asking(tree, first), scale, out, None, 0)
    return out


def commit(
    keys: Tensor, values: Tensor, slots: Tensor, lengths: Sequence[int], k: Tensor, v: Tensor, path: PackedPath
) -> None:
    """See `api.commit`."""
    _commit(_whole_slots(keys, values, slots, lengths), k, v, path.tables, 0)


def verify_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    committed: Paged,
    tree: TreeTables,
    scale: float,
    out: Tensor,
    scratch: Workspace | None,
) -> None:
    """See `api.verify_paged`."""
    asking = _Asking(tree.cu_rows, tree.seq_of_row)
    _attend(q, k, v, committed, tree, asking, scale, out, scratch, committed.page_len)


def commit_paged(committed: Paged, k: Tensor, v: Tensor, path: PathTables) -> None:
    """See `api.commit_paged`."""
    _commit(committed, k, v, path, committed.page_len)


def compact_paged(committed: Paged, tree: TreeTables, path: PathTables) -> None:
    """See `api.compact_paged`."""
    keys, values, table, lengths = committed
    _, page_len, num_heads, head_dim = keys.shape
    launch(
        compact_rows_kernel,
        (table.shape[0] if path.rows.shape[1] else 0, num_heads),
        *(keys, values, table, lengths, tree.cu_rows, path.rows, path.lengths, keys.shape[0], committed.max_places),
        *(*path.rows.stride(), *keys.stride(), *values.stride(), *table.stride()),
        E=head_dim,
        PAGE=page_len,
        BP=MOVED_AT_ONCE,
        BE=shapes.block_of(head_dim),
    )


def workspace(num_rows: int, num_heads: int, head_dim: int, max_places: int, device: torch.device | str) -> Workspace:
    """See `api.workspace`."""
    shape = (shapes.CHUNKING.num_parts(max_places), num_rows, num_heads)
    empty = [torch.empty(*shape, *tail, dtype=torch.float32, device=device) for tail in ((head_dim,), (), ())]
    return Workspace(*empty)


def warm(facts: Facts) -> None:
    """Compile the kernels of every bucket, and both commits, on sequences of length -1."""
    if not facts.num_query_heads:
        return

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=facts.dtype, device=facts.device)

    q, k = zeros(1, facts.num_query_heads, facts.head_dim), zeros(1, facts.num_kv_heads, facts.head_dim)
    pool = zeros(1, facts.page_len, facts.num_kv_heads, facts.head_dim)
    columns = -(-facts.max_places // facts.page_len)
    for num_seqs, max_rows, max_path in facts.buckets:
        table = torch.zeros(num_seqs, columns, dtype=facts.table_dtype, device=facts.device)
        committed = Paged(pool, pool, table, torch.full_like(table[:, 0], INERT))
        tree, path = empty_trees(num_seqs, 1, max_rows, facts.device), empty_paths(num_seqs, max_path, facts.device)
        verify_paged(q, k, k, committed, tree, 1.0, torch.empty_like(q), None)
        commit_paged(committed, k, k, path)
        compact_paged(committed, tree, path)


def _whole_slots(keys: Tensor, values: Tensor, slots: Tensor, lengths: Sequence[int]) -> Paged:
    """Take each slot for one page that holds the whole sequence."""
    check_slots(slots, keys.shape[0])
    known = torch.tensor(list(lengths), dtype=torch.int32, device=slots.device)
    return Paged(keys, values, slots[:, None], torch.where(slots < 0, -1, known))


def _asking(tree: PackedTree, first: list[int]) -> _Asking:
    if not any(first):
        return _Asking(tree.tables.cu_rows, tree.tables.seq_of_row)
    counts = [size - start for size, start in zip(tree.sizes, first, strict=True)]
    counts.append(tree.num_rows - tree.starts[-1])
    owners = torch.tensor([*range(tree.num_seqs), -1], dtype=torch.int32)
    seq = owners.repeat_interleave(torch.tensor(counts)).to(tree.device)
    cu = torch.tensor([0, *counts[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(tree.device)
    return _Asking(cu, seq)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    committed: Paged,
    tree: TreeTables,
    asking: _Asking,
    scale: float,
    out: Tensor,
    scratch: Workspace | None,
    page: int,
) -> None:
    _check(q, k, v, committed.keys, committed.values, scale)
    num_parts = shapes.CHUNKING.num_parts(committed.max_places)
    num_queries, num_heads, head_dim = q.shape
    if scratch is None:
        scratch = workspace(num_queries, num_heads, head_dim, committed.max_places, q.device)
    _check_scratch(scratch, (num_parts, num_queries, num_heads), head_dim)
    # exp(x) = exp2(x * log2(e))
    scale = scale * math.log2(math.e)
    _launch_parts(q, k, v, committed, tree, asking, scale, scratch, page)
    _launch_merge(scratch, asking, committed, tree.max_rows, k.shape[1], scale, out)


def _launch_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    committed: Paged,
    tree: TreeTables,
    asking: _Asking,
    scale: float,
    scratch: Workspace,
    page: int,
) -> None:
    keys, values, table, lengths = committed
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_pairs = tree.max_rows * num_heads // num_kv_heads
    made_for = shapes.Launch(tree.num_seqs, num_kv_heads, num_pairs, committed.max_places, head_dim, q.dtype)
    blocks, block = shapes.geometry(made_for, shapes.gpu_of(q.device)), shapes.block_of(head_dim)
    units = shapes.num_units(
        tree.max_rows, num_heads // num_kv_heads, committed.max_places, blocks.pairs, shapes.CHUNKING
    )
    launch(
        attend_parts_kernel,
        (units * (block // blocks.columns), num_kv_heads, tree.num_seqs if num_queries else 0),
        *(q, k, v, keys, values, table, lengths, tree.cu_rows, asking.cu, tree.ancestors, *scratch),
        *(scale, keys.shape[0], committed.max_places, tree.max_rows, num_queries, *shapes.CHUNKING),
        *(*q.stride(), *k.stride(), *v.stride(), *keys.stride(), *values.stride(), *table.stride()),
        *tree.ancestors.stride(),
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        E=head_dim,
        PAGE=page,
        PIECE=min(page & -page, blocks.places) if page else blocks.places,
        UNIT=shapes.unit_of(keys, values),
        BM=blocks.pairs,
        BN=blocks.places,
        BE=block,
        BV=blocks.columns,
        NV=block // blocks.columns,
        NUM_STAGES=blocks.num_stages,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=blocks.num_warps,
    )


def _launch_merge(
    scratch: Workspace,
    asking: _Asking,
    committed: Paged,
    max_rows: int,
    num_kv_heads: int,
    scale: float,
    out: Tensor,
) -> None:
    num_queries, num_heads, head_dim = out.shape
    launch(
        merge_parts_kernel,
        (num_queries, num_heads),
        *(*scratch, asking.seq, asking.cu, committed.lengths, out, scale, committed.max_places, max_rows, num_queries),
        *(*shapes.CHUNKING, *out.stride()),
        HQ=num_heads,
        G=num_heads // num_kv_heads,
        E=head_dim,
        BP=MERGED_AT_ONCE,
        BE=shapes.block_of(head_dim),
        num_warps=2,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
    dtypes = {x.dtype for x in (q, k, v, keys, values)}
    if len(dtypes) > 1 or scale <= 0:
        raise UnsupportedError(
            "Attention kernels must have operands of one dtype and a scale above 0; got "
            f"{sorted(str(x).removeprefix('torch.') for x in dtypes)} and scale {scale}. Use backend='eager'."
        )
    shapes.check_operands(q.dtype, q.shape[2])
    refuse_interpreted_bfloat16(q)


def _check_scratch(scratch: Workspace, shape: tuple[int, int, int], head_dim: int) -> None:
    size = math.prod(shape)
    fits = scratch.sums.numel() >= size * head_dim and min(scratch.tops.numel(), scratch.totals.numel()) >= size
    if not (fits and all(part.is_contiguous() for part in scratch)):
        raise CapacityError(
            f"scratch must be contiguous and hold {[*shape, head_dim]} sums; got {list(scratch.sums.shape)}. "
            "Make it with attention.workspace for the largest step."
        )


def _commit(committed: Paged, k: Tensor, v: Tensor, path: PathTables, page: int) -> None:
    keys, values, table, lengths = committed
    _, _, num_heads, head_dim = keys.shape
    launch(
        commit_rows_kernel,
        (table.shape[0], path.rows.shape[1]),
        *(k, v, keys, values, table, lengths, path.rows, path.lengths),
        *(k.shape[0], keys.shape[0], committed.max_places),
        *(*path.rows.stride(), *k.stride(), *v.stride(), *keys.stride(), *values.stride(), *table.stride()),
        HK=num_heads,
        E=head_dim,
        PAGE=page,
        BH=1 << (num_heads - 1).bit_length(),
        BE=shapes.block_of(head_dim),
    )
