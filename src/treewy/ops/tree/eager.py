"""Tree tables in PyTorch: pointers double until every row has reached the top, without a look from the host."""

import torch

from treewy.ops.tree.api import FAULT_BOUNDS, FAULT_PARENT, FAULT_SIZE
from treewy.packed import WORD, PathTables, TreeTables
from treewy.shapes import Tensor


def tables(parents: Tensor, cu_rows: Tensor, out: TreeTables, faults: Tensor | None) -> None:
    """See `api.tables`."""
    num_rows, num_seqs, device = out.num_rows, out.num_seqs, parents.device
    bounds = cu_rows.long().cummax(0).values.clamp(0, num_rows)
    rows = torch.arange(num_rows, device=device)
    seq = torch.searchsorted(bounds[1:], rows, right=True) if num_seqs else rows
    owned = (seq < num_seqs) & (rows >= bounds[0])
    seq = torch.where(owned, seq, 0)
    places = rows - bounds[seq]
    fits = owned & (places < out.max_rows)
    up = parents.long()
    sound = torch.where(places == 0, up == -1, (up >= 0) & (up < places))
    top, nowhere = num_rows, num_rows + 1
    onward = torch.where(places == 0, top, bounds[seq] + up)
    pointers = torch.cat([torch.where(fits & sound, onward, nowhere), rows.new_tensor([top, nowhere])])
    depth = (pointers < num_rows).long()
    words = _own_bits(torch.where(fits, places, -1), out.ancestors.shape[1])
    for _ in range(max(0, out.max_rows - 1).bit_length() + 1):
        words, depth = words | words[pointers], depth + depth[pointers]
        pointers = pointers[pointers]
    ok = (pointers == top)[:num_rows]
    if faults is not None:
        _find(cu_rows, bounds, fits & ~ok, seq, out.max_rows, faults)
    owner = torch.where(ok, seq, -1)
    results = (torch.where(ok, up, -1), bounds, owner, ok * depth[:-2], torch.where(ok[:, None], words[:-2], 0))
    for buffer, result in zip(out[:5], results, strict=True):
        buffer.copy_(result)


def paths(tables: TreeTables, nodes: Tensor, out: PathTables) -> None:
    """See `api.paths`."""
    num_seqs, room = out.rows.shape
    out.rows.fill_(tables.num_rows)
    out.lengths.zero_()
    if 0 in (num_seqs, tables.num_rows):
        return
    starts, ends = tables.cu_rows.long().unfold(0, 2, 1).unbind(1)
    nodes = nodes.long()
    row = (starts + nodes).clamp(0, tables.num_rows - 1)
    within = (nodes >= 0) & (nodes < ends - starts)
    within &= tables.seq_of_row[row] == torch.arange(num_seqs, device=row.device)
    depth = torch.where(within, tables.depth[row].long(), -1)
    out.lengths.copy_((depth + 1).clamp(max=room))
    # Column `room` takes what no path has room for.
    padded = torch.full((num_seqs, room + 1), tables.num_rows, dtype=torch.int32, device=row.device)
    for _ in range(tables.max_rows):
        column = torch.where((depth >= 0) & (depth < room), depth, room)
        padded.scatter_(1, column[:, None], row[:, None].int())
        row = torch.where(depth > 0, starts + tables.parents[row], row)
        depth = depth - 1
    out.rows.copy_(padded[:, :room])


def _own_bits(places: Tensor, num_words: int) -> Tensor:
    """Return each row's own bit, none for place -1, and two rows without any after them."""
    words = torch.arange(num_words, device=places.device)
    bits = torch.bitwise_left_shift(torch.ones_like(places, dtype=torch.int32), (places % WORD).int())
    own = torch.where((places[:, None] // WORD == words) & (places[:, None] >= 0), bits[:, None], 0)
    return torch.cat([own, own.new_zeros(2, num_words)])


def _find(cu_rows: Tensor, bounds: Tensor, lost: Tensor, seq: Tensor, max_rows: int, faults: Tensor) -> None:
    moved = bounds != cu_rows
    rootless = torch.zeros_like(faults, dtype=torch.int64)
    if len(faults):
        rootless.index_add_(0, seq, lost.long())
    sizes = bounds[1:] - bounds[:-1]
    found = FAULT_BOUNDS * (moved[1:] | moved[:-1]) + FAULT_SIZE * (sizes > max_rows) + FAULT_PARENT * (rootless > 0)
    faults.copy_(found)
