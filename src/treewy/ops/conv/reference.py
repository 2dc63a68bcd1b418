"""Tree convolution in NumPy float64: each root path as the plain causal convolution of its inputs."""

import numpy as np
import torch

from treewy.ops.paths import check_path_rows
from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.tree import DraftTree


def verify(x, weight, bias, window, slots, tree: PackedTree | TreeTables, activation: str | None, out) -> None:
    """See `api.verify`."""
    check_slots(slots, window.shape[0])
    taps = _numpy(weight).T
    inputs, windows = _numpy(x), _numpy(window)
    bounds, parents = tree.cu_rows.tolist(), tree.parents.tolist()
    y = np.zeros(x.shape)
    for seq, slot in enumerate(slots.tolist()):
        start, end = bounds[seq : seq + 2]
        if slot < 0 or start == end:
            continue
        shape = DraftTree(parents[start:end])
        for row in range(shape.num_rows):
            path = [start + node for node in shape.path(row)]
            history = np.concatenate([windows[slot], inputs[path]])[-len(taps) :]
            y[path[-1]] = (history * taps).sum(axis=0)
            if bias is not None:
                y[path[-1]] += _numpy(bias)
    if activation is not None:
        y = y * 0.5 * (1 + np.tanh(y / 2))  # silu; the logistic as tanh never overflows
    out.copy_(torch.from_numpy(y))


def commit(window: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, path: PackedPath | PathTables) -> None:
    """See `api.commit`."""
    check_slots(slots, window.shape[-3])
    tables = path.tables if isinstance(path, PackedPath) else path
    check_path_rows(tables, [(0, x.shape[-2]) if slot >= 0 else None for slot in slots.tolist()])
    for seq, (slot, length) in enumerate(zip(slots.tolist(), tables.lengths.tolist(), strict=True)):
        if length and slot >= 0:
            rows = tables.rows[seq, :length].long()
            inputs = torch.cat([window[..., slot, :, :], x[..., rows, :].to(window.dtype)], dim=-2)
            window[..., slot, :, :] = inputs[..., length:, :]


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
