"""How many rows each slot's history holds: which histories a step folds, and what they hold after it.

All layers of a model share these lengths. A step chooses its folds before its first layer, and settles them after its last.
"""

from types import ModuleType

import torch

from treewy.errors import ShapeError
from treewy.ops.dispatch import Implementations, select
from treewy.shapes import Int, Tensor


def choose_folds(
    lengths: Int[Tensor, "S"],
    slots: Int[Tensor, "B"],
    path_lengths: Int[Tensor, "B"],
    capacity: int,
    *,
    out: Int[Tensor, "B"] | None = None,
    backend: str | None = None,
) -> Int[Tensor, "B"]:
    """Return 1 for each sequence whose pending path does not fit beside its history any more, else 0.

    Without histories, capacity 0, every path that is not empty folds. All backends are safe in a CUDA graph.

    Args:
        lengths: Rows that each slot's history holds.
        slots: Where each sequence's length lies: its slot, or its place where histories have places of their own
            (`Prior.places`). One outside `lengths`, as -1 is, folds nothing.
        path_lengths: Rows of the path that is pending, per sequence.
        capacity: Rows that a history has places for.
        out: int32 buffer to write into; default: a fresh one.
        backend: "eager" (default), "reference", which is the same, or "triton".

    Raises:
        ShapeError: an operand is not of one axis, or slots, path lengths and out differ in length.

    Source: section 5 of docs/theory.md.
    """
    out = torch.empty(slots.shape, dtype=torch.int32, device=slots.device) if out is None else out
    _check(lengths, slots, path_lengths=path_lengths, out=out)
    _implementation("gdn.choose_folds", backend).choose_folds(lengths, slots, path_lengths, capacity, out)
    return out


def settle(
    lengths: Int[Tensor, "S"],
    slots: Int[Tensor, "B"],
    path_lengths: Int[Tensor, "B"],
    fold: Int[Tensor, "B"],
    *,
    backend: str | None = None,
) -> None:
    """Bring lengths to what the step left: 0 where it folded, else the path's rows more; other slots keep theirs.

    Arguments and errors as in `choose_folds`, with `fold` as that returned it. No slot may be given twice.
    """
    _check(lengths, slots, path_lengths=path_lengths, fold=fold)
    _implementation("gdn.settle", backend).settle(lengths, slots, path_lengths, fold)


def _implementation(op: str, backend: str | None) -> ModuleType:
    from treewy.ops.gdn import ledger_eager

    return select(op, Implementations(ledger_eager, ledger_eager, "treewy.ops.gdn.ledger_kernels"), backend)


def _check(lengths: Tensor, slots: Tensor, **operands: Tensor) -> None:
    if lengths.ndim != 1 or slots.ndim != 1:
        raise ShapeError(
            f"lengths must be [slots of the pool] and slots [sequences]; got shapes {tuple(lengths.shape)} and "
            f"{tuple(slots.shape)}. Pass one axis of each."
        )
    for name, operand in operands.items():
        if operand.shape != slots.shape:
            raise ShapeError(
                f"{name} must have one entry per sequence, {slots.shape[0]}; got shape {tuple(operand.shape)}. Pass those of "
                "the sequences whose slots these are."
            )
