"""Tree convolution in PyTorch: one gather of W rows per row, one weighted sum."""

import torch
from torch.nn import functional

from treewy.ops.dispatch import compute_dtype
from treewy.ops.paths import check_path_rows
from treewy.ops.slots import check_slots, gather_slots, kept, live_rows, written, zero_inert
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.shapes import Int, Tensor


def verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    tree: PackedTree | TreeTables,
    activation: str | None,
    out: Tensor,
) -> None:
    """See `api.verify`."""
    all_live = check_slots(slots, window.shape[0])
    dtype, width = compute_dtype(x, weight), weight.shape[1]
    packed = isinstance(tree, PackedTree)
    places = tree.nearest_ancestors(width) if packed else _nearest_ancestors(tree, width)
    inputs = _inputs(x, window, slots, all_live).to(dtype)[places]
    y = (inputs * weight.T.to(dtype)).sum(dim=1)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation is not None:
        y = functional.silu(y)
    if packed:
        out.copy_(zero_inert(y, slots, tree, all_live=all_live))
    else:
        out.copy_(torch.where(live_rows(slots, tree)[:, None], y, y.new_zeros(())))


def commit(window: Tensor, slots: Tensor, x: Tensor, path: PackedPath | PathTables) -> None:
    """See `api.commit`."""
    if window.ndim == 4:
        for one, inputs in zip(window, x, strict=True):
            commit(one, slots, inputs, path)
        return
    all_live = check_slots(slots, window.shape[0])
    width = window.shape[1] + 1
    if isinstance(path, PackedPath):
        targets, live = written(slots, path, all_live=all_live)
        newest = kept(path.newest_inputs(width), live)
    else:
        check_path_rows(path, [(0, len(x)) if slot >= 0 else None for slot in slots.tolist()])
        live = (slots >= 0) & (path.lengths > 0)
        read = path._replace(lengths=torch.where(live, path.lengths, 0))  # others' may be anything
        targets, newest = slots.long()[live], _newest_inputs(read, x.shape[0], width)[live]
    if len(targets):
        window.index_copy_(0, targets, _inputs(x, window, slots, all_live)[newest].to(window.dtype))


def _inputs(x: Tensor, window: Tensor, slots: Tensor, all_live: bool) -> Tensor:
    """Return the rows' inputs followed by every sequence's window: [N + B (W-1), C], in the wider of both dtypes."""
    committed = gather_slots(window, slots, all_live=all_live).flatten(0, 1)
    dtype = torch.promote_types(x.dtype, window.dtype)
    return torch.cat([x.to(dtype), committed.to(dtype)])


def _nearest_ancestors(tree: TreeTables, width: int) -> Int[Tensor, "N W"]:
    """Return what `PackedTree.nearest_ancestors` does."""
    rows = torch.arange(tree.num_rows, device=tree.device)
    owned, seq = tree.seq_of_row >= 0, tree.seq_of_row.clamp(min=0).long()
    start, parents = tree.cu_rows.long()[seq], tree.parents.long()
    newest = tree.num_rows + (seq + 1) * (width - 1) - 1
    places, local, taken = [rows], parents, torch.zeros_like(rows)
    for _ in range(width - 1):
        inside = local >= 0
        above = torch.where(inside, start + local, newest - taken)
        places.append(torch.where(owned, above, rows))
        taken = taken + ~inside
        local = torch.where(inside, parents[start + local.clamp(min=0)], -1)
    return torch.stack(places[::-1], dim=1)


def _newest_inputs(path: PathTables, num_rows: int, width: int) -> Int[Tensor, "B W1"]:
    """Return what `PackedPath.newest_inputs` does, for every sequence."""
    window, seqs = width - 1, torch.arange(len(path.lengths), device=path.lengths.device)
    places = torch.arange(window, device=seqs.device)
    old = num_rows + seqs[:, None] * window + places
    source = path.lengths.long()[:, None] + places
    return torch.cat([old, path.rows.long()], dim=1).gather(1, source)
