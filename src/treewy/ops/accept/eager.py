"""Acceptance over tables in PyTorch: greedy walks of a batch at once; sampled ones on the host, laws on the device."""

import torch

from treewy.ops.accept import host
from treewy.ops.accept.host import uniforms
from treewy.ops.accept.records import NO_TOKEN, AcceptedTables, DrawnLaws, Ending, RequestLaws
from treewy.packed import TreeTables
from treewy.sampling import Law
from treewy.shapes import Array, Tensor

__all__ = ["choices", "sampled", "uniforms", "walk_choices"]


def choices(logits: Tensor, tables: TreeTables | None, slots: Tensor | None, out: Tensor) -> None:
    """See `api.choices`."""
    chosen = logits.argmax(dim=-1)
    known = logits.gather(-1, chosen[:, None]).squeeze(-1).isfinite()
    if tables is not None and tables.num_seqs:
        seq = tables.seq_of_row.long()
        known &= (seq >= 0) if slots is None else (seq >= 0) & (slots[seq.clamp(min=0)] >= 0)
    elif tables is not None:
        known = torch.zeros_like(known)
    out.copy_(torch.where(known, chosen, NO_TOKEN))


def walk_choices(
    tables: TreeTables, tokens: Tensor, choices: Tensor, slots: Tensor | None, out: AcceptedTables
) -> None:
    """See `api.walk_choices`."""
    room, num_rows = out.path.rows.shape[1], tables.num_rows
    out.path.rows.fill_(num_rows)
    out.tokens.fill_(NO_TOKEN)
    for counts in (out.path.lengths, out.num_used):
        counts.zero_()
    out.endings.fill_(int(Ending.NOTHING))
    if 0 in (tables.num_seqs, num_rows):
        return
    starts = tables.cu_rows[:-1].long()
    seqs = torch.arange(tables.num_seqs, device=starts.device)
    places = torch.arange(num_rows, device=starts.device)
    row = starts.clamp(max=num_rows - 1)
    going = (starts < tables.cu_rows[1:]) & (tables.seq_of_row[row] == seqs)
    going &= torch.ones_like(going) if slots is None else slots >= 0
    # A place of its own for each row's parent, so that a child is found by one comparison.
    above = torch.where(tables.parents >= 0, starts[tables.seq_of_row.clamp(min=0).long()] + tables.parents, -1)
    endings = torch.where(going, int(Ending.CUT), int(Ending.NOTHING))
    for step in range(room):
        choice = choices[row].long()
        known = going & (choice >= 0)
        endings = torch.where(going & ~known, int(Ending.NOT_FINITE), endings)
        out.path.rows[:, step] = torch.where(known, row, num_rows).int()
        out.tokens[:, step] = torch.where(known, choice, NO_TOKEN).int()
        out.path.lengths.add_(known)
        below = above == row[:, None]
        child = torch.where(below & (tokens == choice[:, None]), places, num_rows).amin(-1)
        ends = known & (child == num_rows)
        endings = torch.where(ends, torch.where(below.any(-1), int(Ending.RECOVERED), int(Ending.BONUS)), endings)
        going = known & ~ends
        row = torch.where(going, child, row)
    out.endings.copy_(endings)


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
        chosen = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        choices(logits, None, None, chosen)
        return chosen

    host.sampled(tables, tokens, logits, laws, uniforms, drawn, slots, out, _law, choices_of)


def _law(logits: Tensor, law: Law) -> Array:
    return law.probabilities(logits[None])[0].cpu().numpy()
