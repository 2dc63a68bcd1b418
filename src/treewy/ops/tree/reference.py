"""The definition of tree tables: every row walks to its root, on the host."""

from itertools import pairwise

import numpy as np
import torch

from treewy.ops.tree.api import FAULT_BOUNDS, FAULT_PARENT, FAULT_SIZE
from treewy.packed import WORD, PathTables, TreeTables
from treewy.shapes import Array, Tensor


def tables(parents: Tensor, cu_rows: Tensor, out: TreeTables, faults: Tensor | None) -> None:
    """See `api.tables`."""
    given, bounds = parents.cpu().numpy(), cu_rows.cpu().numpy().astype(np.int64)
    num_rows = len(given)
    moved = np.clip(np.maximum.accumulate(bounds), 0, num_rows)
    up, owner, depth = np.full(num_rows, -1), np.full(num_rows, -1), np.zeros(num_rows, dtype=int)
    words = np.zeros(out.ancestors.shape, dtype=np.uint32)
    found = np.zeros(out.num_seqs, dtype=int)
    for seq, (start, end) in enumerate(pairwise(moved)):
        found[seq] |= FAULT_BOUNDS * (bounds[seq] != start or bounds[seq + 1] != end)
        found[seq] |= FAULT_SIZE * (end - start > out.max_rows)
        for place in range(min(end - start, out.max_rows)):
            path = _up(given[start:end], place)
            if path is None:
                found[seq] |= FAULT_PARENT
                continue
            row = start + place
            up[row], owner[row], depth[row] = given[row], seq, len(path) - 1
            for node in path:
                words[row, node // WORD] |= np.uint32(1) << np.uint32(node % WORD)
    results = (up, moved, owner, depth, words.view(np.int32))
    for buffer, result in zip(out[:5], results, strict=True):
        buffer.copy_(torch.from_numpy(result))
    if faults is not None:
        faults.copy_(torch.from_numpy(found))


def paths(tables: TreeTables, nodes: Tensor, out: PathTables) -> None:
    """See `api.paths`."""
    parents, owner, starts = (x.tolist() for x in (tables.parents, tables.seq_of_row, tables.cu_rows))
    out.rows.fill_(tables.num_rows)
    for seq, node in enumerate(nodes.tolist()):
        start, end = starts[seq], starts[seq + 1]
        path = []
        if 0 <= node < end - start and owner[start + node] == seq:
            path = [start + row for row in _up(np.array(parents[start:end]), node) or ()]
        path = path[: out.rows.shape[1]]
        out.rows[seq, : len(path)] = torch.tensor(path, dtype=torch.int32)
        out.lengths[seq] = len(path)


def _up(parents: Array, place: int) -> list[int] | None:
    """Return the path from the root to `place`, or None if there is no way."""
    path = [place]
    while path[-1] > 0:
        parent = int(parents[path[-1]])
        if not 0 <= parent < path[-1]:
            return None
        path.append(parent)
    return path[::-1] if parents[0] == -1 else None
