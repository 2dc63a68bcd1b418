"""Bookkeeping of histories in PyTorch, without a question to the device."""

import torch

from treewy.shapes import Bool, Int, Tensor


def choose_folds(lengths: Tensor, slots: Tensor, path_lengths: Tensor, capacity: int, out: Tensor) -> None:
    """See `ledger.choose_folds`."""
    live, held = _held(lengths, slots)
    out.copy_(live & (held + path_lengths > capacity))


def settle(lengths: Tensor, slots: Tensor, path_lengths: Tensor, fold: Tensor) -> None:
    """See `ledger.settle`."""
    live, held = _held(lengths, slots)
    change = torch.where(fold != 0, -held, path_lengths)
    # Sequences on no slot add nothing to slot 0, which keeps every bit.
    lengths.index_add_(0, torch.where(live, slots, 0).long(), torch.where(live, change, 0).to(lengths.dtype))


def _held(lengths: Int[Tensor, "S"], slots: Int[Tensor, "B"]) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"]]:
    """Return which sequences have a slot, and how many rows its history holds; 0 where there is none."""
    live = (slots >= 0) & (slots < lengths.shape[0])
    return live, torch.where(live, lengths[torch.where(live, slots, 0).long()], 0)
