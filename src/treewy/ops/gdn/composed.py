"""The serving entry as its definition: the finished ops of an implementation, one after the other, checked on the host."""

from itertools import pairwise
from types import ModuleType

import torch

from treewy.errors import CapacityError
from treewy.ops.dispatch import compute_dtype
from treewy.ops.gdn.gates import L2_EPS, finish_gates, l2_normalise, scale_queries
from treewy.ops.gdn.records import History, Prior, Projections, Verified
from treewy.ops.paths import check_path_rows
from treewy.ops.slots import INERT, check_slots, gather_slots
from treewy.packed import WORD, PackedTree, TreeTables, pack
from treewy.shapes import Float, Int, Tensor
from treewy.tree import DraftTree


def commit_verify(
    ops: ModuleType,
    x: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    prior: Prior | None,
    out: Verified,
) -> None:
    """See `serving.commit_verify`; `ops` is the sibling that folds and verifies."""
    check_slots(slots, state.shape[0])
    places = slots
    if prior is not None and prior.history is not None and prior.places is not None:
        places = torch.where(slots >= 0, prior.places, INERT)
        check_slots(places, prior.history.lengths.shape[0], what="place")
    seqs = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), -1)
    own, before = gather_slots(state, slots), None
    if prior is not None:
        before = _prior_rows(prior, slots, places, own, x.k.shape[1])
        folds = before.lengths > 0
        if prior.history is not None:
            folds &= (prior.fold != 0) | (places < 0)
            _append(prior.history, places, before, ~folds)
        ops.fold(own, torch.where(folds, seqs, -1), before)
        state[slots[folds].long()] = own[folds]
    packed, drawn, rows = packed_trees(tree)
    q, k, v, a, b = (part[rows] for part in x[:5])
    g, beta = finish_gates(a, b, x.a_log, x.dt_bias, beta_scale=x.beta_scale)
    o, record = ops.verify(scale_queries(q), l2_normalise(k), v, g, beta, own, seqs[drawn], packed, out.o.dtype, before)
    inverse_norm = inverse_norms(k).repeat_interleave(v.shape[1] // k.shape[1], dim=1)
    u = record.u * inverse_norm[..., None]
    out.o.zero_()
    for buffer, part in zip((out.o, *out.record), (o, u, k, record.decay_high, record.decay_low), strict=True):
        buffer[rows] = part.to(buffer.dtype)


def inverse_norms(k: Float[Tensor, "N H K"]) -> Float[Tensor, "N H"]:
    """Return what `l2_normalise` multiplies each key by."""
    wide = k if k.dtype == torch.float64 else k.float()
    return torch.rsqrt(wide.square().sum(-1) + L2_EPS)


def packed_trees(tree: TreeTables) -> tuple[PackedTree, Int[Tensor, "A"], Int[Tensor, "R"]]:
    """Return the trees as the host knows them, without inert rows, whose sequences they are, and their rows in the tables.

    A row that is not its own ancestor is inert, and one that lies `max_rows` rows or more behind its tree's first.
    """
    parents, words = tree.parents.tolist(), tree.ancestors.tolist()
    trees, drawn, rows = [], [], []
    for seq, (start, end) in enumerate(pairwise(tree.cu_rows.tolist())):
        places = range(min(end - start, tree.max_rows))
        own = [place for place in places if words[start + place][place // WORD] >> place % WORD & 1]
        if own:
            new = {-1: -1} | {place: at for at, place in enumerate(own)}
            trees.append(DraftTree([new.get(parents[start + place], len(own)) for place in own]))
            drawn.append(seq)
            rows += [start + place for place in own]
    of_seqs, of_rows = (torch.tensor(kept, dtype=torch.int64, device=tree.device) for kept in (drawn, rows))
    return pack(trees, device=tree.device), of_seqs, of_rows


def _prior_rows(prior: Prior, slots: Tensor, places: Tensor, own: Float[Tensor, "B HV V K"], num_heads: int) -> History:
    """Return each sequence's prior rows, with log decays counted from its checkpoint, as a history of its own."""
    history, record, path = prior.history, prior.record, prior.path
    capacity = 0 if history is None else history.num_rows
    pending = 0 if path is None else path.rows.shape[1]
    batch, value_heads, value_dim, key_dim = own.shape
    size, dtype = (batch, max(1, capacity + pending)), compute_dtype(own)
    before = History(
        own.new_zeros(*size, value_heads, value_dim, dtype=dtype),
        own.new_zeros(*size, num_heads, key_dim, dtype=dtype),
        own.new_zeros(*size, value_heads, dtype=torch.float64),
        own.new_zeros(*size, value_heads, dtype=torch.float64),
        torch.zeros(batch, dtype=torch.int64, device=own.device),
    )
    if path is not None and record is not None:
        num_rows = record.u.shape[0]
        check_path_rows(path, [(0, num_rows) if slot >= 0 else None for slot in slots.tolist()])
    kept = [0] * batch if history is None else gather_slots(history.lengths, places).tolist()
    accepted = [0] * batch if path is None else path.lengths.tolist()
    for seq, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        if slot < 0:
            continue
        start, end = kept[seq], kept[seq] + accepted[seq]
        if history is not None:
            for part, mine in zip(history[:4], before[:4], strict=True):
                mine[seq, :start] = part[place, :start]
        if record is not None and path is not None:
            rows = path.rows[seq, : accepted[seq]].long()
            for part, mine in zip(record, before[:4], strict=True):
                mine[seq, start:end] = part[rows]
        before.lengths[seq] = end
        newest = before.decay_high[seq, start - 1] + before.decay_low[seq, start - 1] if start else 0.0
        log_decay = before.decay_high[seq] + before.decay_low[seq]
        log_decay[start:end] += newest
        before.decay_high[seq], before.decay_low[seq] = log_decay, 0.0
    return before


def _append(history: History, places: Tensor, before: History, chosen: Tensor) -> None:
    """Write the prior rows of chosen sequences that their histories lack."""
    kept, ends = gather_slots(history.lengths, places).tolist(), before.lengths.tolist()
    moves = [
        (seq, place, slice(kept[seq], ends[seq]))
        for seq, (place, taken) in enumerate(zip(places.tolist(), chosen.tolist(), strict=True))
        if taken and place >= 0
    ]
    for _, place, rows in moves:
        if rows.stop > history.num_rows:
            raise CapacityError(
                f"A history must have room for its path; the one at {place} holds {rows.start} of {history.num_rows} rows and "
                f"the path has {rows.stop - rows.start}. Set fold for this sequence."
            )
    for seq, place, rows in moves:
        history.u[place, rows] = before.u[seq, rows].to(history.u.dtype)
        history.k[place, rows] = before.k[seq, rows].to(history.k.dtype)
        log_decay, high = before.decay_high[seq, rows], history.decay_high[place, rows]
        high.copy_(log_decay)
        history.decay_low[place, rows] = (log_decay - high.double()).to(history.decay_low.dtype)
