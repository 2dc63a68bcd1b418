"""Tree attention in PyTorch: a loop over sequences, so that no prefix is ever copied or padded."""

from collections.abc import Sequence

import torch

from treewy.ops.dispatch import compute_dtype
from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Tensor
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
        bits = torch.from_numpy(topology(tree.shapes[seq]).ancestors[first[seq] :].copy()).to(q.device)
        grouped = _grouped(q[queries], k.shape[1])
        parts = [_partial(grouped, k[rows], v[rows], scale, bits)]
        if lengths[seq]:
            parts.append(_partial(grouped, keys[slot, : lengths[seq]], values[slot, : lengths[seq]], scale, None))
        merged = parts[0][0] if len(parts) == 1 else _merge(parts)
        out[queries] = merged.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
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


def _grouped(q: Tensor, num_kv_heads: int) -> Tensor:
    """[T, HQ, E] to [HK, HQ / HK, T, E]."""
    dtype = compute_dtype(q)
    return q.to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _partial(q: Tensor, k: Tensor, v: Tensor, scale: float, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend to one set of places; return the normalised output [HK, G, T, E] and the log-sum-exp [HK, G, T, 1]."""
    k, v = (x.to(q.dtype).permute(1, 0, 2).unsqueeze(1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if bits is not None:
        scores = scores.masked_fill(~bits, -torch.inf)
    weight = torch.logsumexp(scores, dim=-1, keepdim=True)
    shares = (scores - weight).exp()
    if bits is None or bool(v.isfinite().all()):
        return shares @ v, weight
    # 0 * NaN is NaN: a value that is not finite leaves the product, and comes back to the rows that see it.
    bad = ~v.isfinite().all(-1)
    sees_bad = (bits & bad[..., None, :]).any(-1, keepdim=True)
    return torch.where(sees_bad, torch.nan, shares @ torch.where(bad[..., None], 0.0, v)), weight


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge parts by their log-sum-exp."""
    weights = torch.softmax(torch.stack([weight for _, weight in parts]), dim=0)
    return (weights * torch.stack([o for o, _ in parts])).sum(dim=0)
