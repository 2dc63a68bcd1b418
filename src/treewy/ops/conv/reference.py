"""Tree convolution in NumPy float64: each root path as the plain causal convolution of its inputs."""

import numpy as np
import torch

from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree
from treewy.tree import DraftTree


def verify(x, weight, bias, window, slots, tree: PackedTree, activation: str | None) -> torch.Tensor:
    """See `api.verify`."""
    check_slots(slots, window.shape[0])
    taps = _numpy(weight).T
    inputs, windows = _numpy(x), _numpy(window)
    y = np.zeros(x.shape)
    for seq, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        shape = DraftTree(tree.shapes[seq])
        for row in range(shape.num_rows):
            path = [tree.starts[seq] + node for node in shape.path(row)]
            history = np.concatenate([windows[slot], inputs[path]])[-len(taps) :]
            y[path[-1]] = (history * taps).sum(axis=0)
            if bias is not None:
                y[path[-1]] += _numpy(bias)
    if activation is not None:
        y = y * 0.5 * (1 + np.tanh(y / 2))  # silu; the logistic as tanh never overflows
    return torch.from_numpy(y).to(x.device, x.dtype)


def commit(window: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, path: PackedPath) -> None:
    """See `api.commit`."""
    check_slots(slots, window.shape[0])
    for seq, (slot, nodes) in enumerate(zip(slots.tolist(), path.paths, strict=True)):
        if nodes and slot >= 0:
            rows = [path.tree.starts[seq] + node for node in nodes]
            window[slot] = torch.cat([window[slot], x[rows].to(window.dtype)])[len(rows) :]


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
