"""Tree convolution in PyTorch: one gather of W rows per row, one weighted sum."""

import torch
from torch.nn import functional

from treewy.ops.dispatch import compute_dtype
from treewy.ops.slots import check_slots, gather_slots, kept, written, zero_inert
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Tensor


def verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    tree: PackedTree,
    activation: str | None,
) -> Tensor:
    """See `api.verify`."""
    all_live = check_slots(slots, window.shape[0])
    dtype = compute_dtype(x, weight)
    inputs = _inputs(x, window, slots, all_live).to(dtype)[tree.nearest_ancestors(weight.shape[1])]
    y = (inputs * weight.T.to(dtype)).sum(dim=1)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation is not None:
        y = functional.silu(y)
    return zero_inert(y, slots, tree, all_live=all_live).to(x.dtype)


def commit(window: Tensor, slots: Tensor, x: Tensor, path: PackedPath) -> None:
    """See `api.commit`."""
    all_live = check_slots(slots, window.shape[0])
    targets, live = written(slots, path, all_live=all_live)
    if len(targets):
        newest = kept(path.newest_inputs(window.shape[1] + 1), live)
        window.index_copy_(0, targets, _inputs(x, window, slots, all_live)[newest].to(window.dtype))


def _inputs(x: Tensor, window: Tensor, slots: Tensor, all_live: bool) -> Tensor:
    """Return the rows' inputs followed by every sequence's window: [N + B (W-1), C], in the wider of both dtypes."""
    committed = gather_slots(window, slots, all_live=all_live).flatten(0, 1)
    dtype = torch.promote_types(x.dtype, window.dtype)
    return torch.cat([x.to(dtype), committed.to(dtype)])
