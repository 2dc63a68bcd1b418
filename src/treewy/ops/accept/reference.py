"""The definition of acceptance over tables: NumPy float64, one sequence at a time, by the rules of `treewy.accept`."""

import numpy as np
import torch

from treewy.ops.accept import host
from treewy.ops.accept.host import uniforms
from treewy.ops.accept.records import NO_TOKEN, AcceptedTables, DrawnLaws, RequestLaws
from treewy.packed import TreeTables
from treewy.sampling import Law
from treewy.shapes import Array, Tensor

__all__ = ["choices", "sampled", "uniforms", "walk_choices"]


def choices(logits: Tensor, tables: TreeTables | None, slots: Tensor | None, out: Tensor) -> None:
    """See `api.choices`."""
    for row, values in enumerate(logits.double().cpu().numpy()):
        out[row] = int(values.argmax()) if _is_live(tables, slots, row) and np.isfinite(values.max()) else NO_TOKEN


def walk_choices(
    tables: TreeTables, tokens: Tensor, choices: Tensor, slots: Tensor | None, out: AcceptedTables
) -> None:
    """See `api.walk_choices`."""
    known = choices.clamp(min=NO_TOKEN)
    host.walk_all(tables, tokens, slots, out, lambda _, given: host.greedy_walk(known, given))


def sampled(
    tables: TreeTables,
    tokens: Tensor,
    logits: Tensor,
    laws: RequestLaws,
    uniforms: Tensor,
    drawn: DrawnLaws | None,
    slots: Tensor | None,
    weights: torch.dtype,
    out: AcceptedTables,
) -> None:
    """See `api.sampled`."""

    def choices_of(logits: Tensor) -> Tensor:
        chosen = torch.empty(len(logits), dtype=torch.int32)
        choices(logits, None, None, chosen)
        return chosen

    host.sampled(tables, tokens, logits, laws, uniforms, drawn, slots, out, _law, choices_of)


def _is_live(tables: TreeTables | None, slots: Tensor | None, row: int) -> bool:
    if tables is None:
        return True
    seq = int(tables.seq_of_row[row])
    return seq >= 0 and (slots is None or int(slots[seq]) >= 0)


def _law(logits: Tensor, law: Law) -> Array:
    """Sort the tokens, and keep the first so many by each rule in turn; tokens as likely as the last of them stay."""
    values = logits.double().cpu().numpy()
    if not np.isfinite(values.max()):
        return np.full_like(values, np.nan)
    p = np.exp((values - values.max()) / law.temperature)
    p = p / p.sum()
    if 0 < law.top_k < len(p):
        p = _kept(p, np.sort(p)[::-1][law.top_k - 1])
    if law.top_p < 1:
        ordered = np.sort(p)[::-1]
        reached = np.flatnonzero(np.cumsum(ordered) >= law.top_p)
        p = _kept(p, float(ordered[reached[0]]) if len(reached) else 0.0)
    return _kept(p, law.min_p * p.max())


def _kept(p: Array, floor: float) -> Array:
    p = np.where(p >= floor, p, 0.0)
    return p / p.sum()
