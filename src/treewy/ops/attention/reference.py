"""Tree attention in NumPy float64: each row's full softmax over its prefix and its root path."""

from collections.abc import Sequence

import numpy as np
import torch

from treewy.ops.attention.records import Paged, check_places, row_spans
from treewy.ops.paths import check_path_rows
from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.tree import DraftTree


def verify(q, k, v, keys, values, slots, lengths, tree: PackedTree, scale: float, first: list[int]) -> torch.Tensor:
    """See `api.verify`."""
    check_slots(slots, keys.shape[0])
    queries, new_keys, new_values = (_numpy(x) for x in (q, k, v))
    out, place = np.zeros(q.shape), 0
    for seq, slot in enumerate(slots.tolist()):
        shape = DraftTree(tree.shapes[seq])
        for row in range(first[seq], shape.num_rows):
            if slot >= 0:
                path = [tree.starts[seq] + node for node in shape.path(row)]
                seen_keys = np.concatenate([_numpy(keys[slot, : lengths[seq]]), new_keys[path]])
                seen_values = np.concatenate([_numpy(values[slot, : lengths[seq]]), new_values[path]])
                out[place] = _attend(queries[place], seen_keys, seen_values, scale)
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


def verify_paged(q, k, v, committed: Paged, tree: TreeTables, scale: float, out, scratch) -> None:
    """See `paged.verify_paged`; paths come from the parents, needs no scratch."""
    queries, new_keys, new_values = (_numpy(x) for x in (q, k, v))
    starts, parents = tree.cu_rows.tolist(), tree.parents.tolist()
    out.zero_()
    for seq, length in enumerate(committed.lengths.tolist()):
        if length < 0:
            continue
        at = check_places(committed, seq, 0, length)
        for row in range(starts[seq], starts[seq + 1]):
            path = [row]
            while parents[path[-1]] >= 0:
                path.append(starts[seq] + parents[path[-1]])
            seen_keys = np.concatenate([_numpy(committed.keys[at]), new_keys[path]])
            seen_values = np.concatenate([_numpy(committed.values[at]), new_values[path]])
            out[row] = torch.from_numpy(_attend(queries[row], seen_keys, seen_values, scale)).to(out.device, out.dtype)


def commit_paged(committed: Paged, k, v, path: PathTables) -> None:
    """See `paged.commit_paged`."""
    check_path_rows(path, [(0, len(k)) if length >= 0 else None for length in committed.lengths.tolist()])
    for seq, (length, added) in enumerate(zip(committed.lengths.tolist(), path.lengths.tolist(), strict=True)):
        if length >= 0:
            pages, places = (x.tolist() for x in check_places(committed, seq, length, length + added))
            for page, place, row in zip(pages, places, path.rows[seq].tolist(), strict=False):
                committed.keys[page, place] = k[row].to(committed.keys.dtype)
                committed.values[page, place] = v[row].to(committed.values.dtype)


def compact_paged(committed: Paged, tree: TreeTables, path: PathTables) -> None:
    """See `paged.compact_paged`."""
    check_path_rows(path, row_spans(committed, tree.cu_rows.tolist()))
    for seq, (length, added) in enumerate(zip(committed.lengths.tolist(), path.lengths.tolist(), strict=True)):
        start, stop = tree.cu_rows[seq : seq + 2].tolist()
        if length >= 0:
            pages, places = (x.tolist() for x in check_places(committed, seq, length, length + stop - start))
            for step, row in enumerate(path.rows[seq, :added].tolist()):
                for pool in committed[:2]:  # a row never moves backwards, so none is overwritten before it is read
                    pool[pages[step], places[step]] = pool[pages[row - start], places[row - start]].clone()


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """Return one row's softmax over what it sees: q [HQ, E], keys and values [n, HK, E]."""
    group = q.shape[0] // keys.shape[1]
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        scores = keys[:, head // group] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[:, head // group] / weights.sum()
    return out


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
