"""Tree attention in PyTorch: a loop over sequences, so that no prefix is ever copied or padded."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from treewy.ops.attention.records import Paged, Workspace, check_places, row_spans
from treewy.ops.dispatch import compute_dtype
from treewy.ops.paths import check_path_rows
from treewy.ops.slots import check_slots
from treewy.packed import WORD, PackedPath, PackedTree, PathTables, TreeTables
from treewy.shapes import Bool, Float, Tensor, lasting
from treewy.tree import topology


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
    check_slots(slots, keys.shape[0])
    out = torch.zeros_like(q)
    start_query = 0
    for seq, slot in enumerate(slots.tolist()):
        rows = slice(tree.starts[seq], tree.starts[seq + 1])
        num_queries = tree.sizes[seq] - first[seq]
        queries = slice(start_query, start_query + num_queries)
        start_query += num_queries
        if slot < 0:
            continue
        bits = _bits(tree.shapes[seq], first[seq], str(q.device))
        length = lengths[seq]
        prefix = (keys[slot, :length], values[slot, :length]) if length else None
        out[queries] = _rows(q[queries], k[rows], v[rows], bits, prefix, scale)
    return out


def commit(
    keys: Tensor, values: Tensor, slots: Tensor, lengths: Sequence[int], k: Tensor, v: Tensor, path: PackedPath
) -> None:
    """See `api.commit`."""
    check_slots(slots, keys.shape[0])
    for seq, slot in enumerate(slots.tolist()):
        nodes = path.paths[seq]
        if nodes and slot >= 0:
            rows = torch.tensor(nodes, device=k.device) + path.tree.starts[seq]
            places = slice(lengths[seq], lengths[seq] + len(nodes))
            keys[slot, places] = k[rows].to(keys.dtype)
            values[slot, places] = v[rows].to(values.dtype)


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
    """See `paged.verify_paged`; needs no scratch."""
    out.zero_()
    starts = tree.cu_rows.tolist()
    for seq, length in enumerate(committed.lengths.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if length < 0 or rows.start == rows.stop:
            continue
        node = torch.arange(rows.stop - rows.start, device=q.device)
        bits = (tree.ancestors[rows][:, node // WORD] >> (node % WORD) & 1).bool()
        pages, places = check_places(committed, seq, 0, length)
        prefix = (committed.keys[pages, places], committed.values[pages, places]) if length else None
        out[rows] = _rows(q[rows], k[rows], v[rows], bits, prefix, scale)


def commit_paged(committed: Paged, k: Tensor, v: Tensor, path: PathTables) -> None:
    """See `paged.commit_paged`."""
    check_path_rows(path, [(0, len(k)) if length >= 0 else None for length in committed.lengths.tolist()])
    for seq, (length, added) in enumerate(zip(committed.lengths.tolist(), path.lengths.tolist(), strict=True)):
        if length >= 0 and added:
            rows = path.rows[seq, :added].long()
            _write(committed, check_places(committed, seq, length, length + added), k[rows], v[rows])


def compact_paged(committed: Paged, tree: TreeTables, path: PathTables) -> None:
    """See `paged.compact_paged`."""
    starts = tree.cu_rows.tolist()
    check_path_rows(path, row_spans(committed, starts))
    for seq, (length, added) in enumerate(zip(committed.lengths.tolist(), path.lengths.tolist(), strict=True)):
        if length >= 0 and added:
            pages, places = check_places(committed, seq, length, length + starts[seq + 1] - starts[seq])
            local = path.rows[seq, :added].long() - starts[seq]
            moved = (pool[pages[local], places[local]] for pool in committed[:2])  # indexing copies
            _write(committed, (pages[:added], places[:added]), *moved)


def _write(committed: Paged, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    committed.keys[at] = k.to(committed.keys.dtype)
    committed.values[at] = v.to(committed.values.dtype)


def _rows(
    q: Float[Tensor, "Q HQ E"],
    k: Float[Tensor, "T HK E"],
    v: Float[Tensor, "T HK E"],
    bits: Bool[Tensor, "Q T"],
    prefix: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Float[Tensor, "Q HQ E"]:
    o = _attend(_grouped(q, k.shape[1]) * scale, k, v, bits, prefix)
    return o.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _grouped(q: Tensor, num_kv_heads: int) -> Tensor:
    """[T, HQ, E] to [HK, HQ / HK, T, E]."""
    dtype = compute_dtype(q)
    return q.to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


@lru_cache(maxsize=256)
@lasting
def _bits(parents: tuple[int, ...], first: int, device: str) -> Bool[Tensor, "Q T"]:
    return torch.from_numpy(topology(parents).ancestors[first:].copy()).to(device)


def _attend(
    q: Float[Tensor, "HK G Q E"],
    k: Float[Tensor, "T HK E"],
    v: Float[Tensor, "T HK E"],
    bits: Bool[Tensor, "Q T"],
    prefix: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "HK G Q E"]:
    """Attend to the rows that `bits` shows and to the whole prefix: one softmax over both, scores side by side."""
    k, v = (_heads_first(x, q.dtype) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).masked_fill(~bits, -torch.inf)
    if prefix is not None:
        scores = torch.cat([scores, q @ _heads_first(prefix[0], q.dtype).transpose(-1, -2)], dim=-1)
    shares = torch.softmax(scores, dim=-1)
    num_rows = v.shape[-2]
    o = _weighted(shares[..., :num_rows], v, bits)
    return o if prefix is None else o + shares[..., num_rows:] @ _heads_first(prefix[1], q.dtype)


def _weighted(shares: Tensor, v: Tensor, bits: Bool[Tensor, "Q T"]) -> Tensor:
    """Return shares @ v. 0 * NaN is NaN: a value that is not finite leaves the product, and comes back to its viewers."""
    if math.isfinite(v.sum().item()):
        return shares @ v
    bad = ~v.isfinite().all(-1)
    sees_bad = (bits & bad[..., None, :]).any(-1, keepdim=True)
    return torch.where(sees_bad, torch.nan, shares @ torch.where(bad[..., None], 0.0, v))


def _heads_first(x: Float[Tensor, "T HK E"], dtype: torch.dtype) -> Float[Tensor, "HK 1 T E"]:
    return x.to(dtype).permute(1, 0, 2).unsqueeze(1)
