"""Tree attention in NumPy float64: each row's full softmax over its prefix and its root path."""

from collections.abc import Sequence

import numpy as np
import torch

from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree
from treewy.tree import DraftTree


def verify(q, k, v, keys, values, slots, lengths, tree: PackedTree, scale: float, first: list[int]) -> torch.Tensor:
    """See `api.verify`."""
    check_slots(slots, keys.shape[0])
    queries, new_keys, new_values = (_numpy(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out, place = np.zeros(q.shape), 0
    for seq, slot in enumerate(slots.tolist()):
        shape = DraftTree(tree.shapes[seq])
        for row in range(first[seq], shape.num_rows):
            if slot >= 0:
                path = [tree.starts[seq] + node for node in shape.path(row)]
                seen_keys = np.concatenate([_numpy(keys[slot, : lengths[seq]]), new_keys[path]])
                seen_values = np.concatenate([_numpy(values[slot, : lengths[seq]]), new_values[path]])
                for head in range(q.shape[1]):
                    scores = seen_keys[:, head // group] @ queries[place, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[place, head] = weights @ seen_values[:, head // group] / weights.sum()
            place += 1
    return torch.from_numpy(out).to(q.device, q.dtype)


def commit(keys, values, slots, lengths: Sequence[int], k, v, path: PackedPath) -> None:
    """See `api.commit`."""
    check_slots(slots, keys.shape[0])
    for seq, (slot, nodes) in enumerate(zip(slots.tolist(), path.paths, strict=True)):
        if slot >= 0:
            for offset, node in enumerate(nodes):
                row = path.tree.starts[seq] + node
                keys[slot, lengths[seq] + offset] = k[row].to(keys.dtype)
                values[slot, lengths[seq] + offset] = v[row].to(values.dtype)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
