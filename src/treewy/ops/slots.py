"""Reading and writing pool slots, where slot -1 is inert."""

import torch

from treewy.errors import CapacityError
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Bool, Int, Tensor

INERT = -1


def check_slots(slots: Int[Tensor, "B"], num_slots: int) -> None:
    """Check that slots lie in -1..num_slots-1 and that no two sequences share one.

    Raises:
        CapacityError: a slot is out of range or taken twice.
    """
    given = slots.tolist()
    live = [slot for slot in given if slot != -1]
    bad = [slot for slot in live if not 0 <= slot < num_slots]
    if bad:
        raise CapacityError(
            f"A slot must be -1 or lie in 0..{num_slots - 1}; got {bad[0]} in {given}. Allocate it first."
        )
    if len(set(live)) != len(live):
        raise CapacityError(f"Two sequences must not share a slot; got {given}. Allocate one slot per sequence.")


def gather_slots(pool: Tensor, slots: Int[Tensor, "B"]) -> Tensor:
    """Return pool[slots], zeros for slot -1 whatever slot 0 holds."""
    live = slots >= 0
    gathered = pool[slots.clamp(min=0).long()]
    return torch.where(
        live.view(-1, *[1] * (pool.ndim - 1)), gathered, torch.zeros((), dtype=pool.dtype, device=pool.device)
    )


def live_rows(slots: Int[Tensor, "B"], tree: PackedTree) -> Bool[Tensor, "N"]:
    """Return which packed rows belong to a sequence on a live slot."""
    seq = tree.seq_of_row
    if tree.num_seqs == 0:
        return torch.zeros_like(seq, dtype=torch.bool)
    return (seq >= 0) & (slots[seq.clamp(min=0)] >= 0)


def written(slots: Int[Tensor, "B"], path: PackedPath) -> tuple[Int[Tensor, "A"], Bool[Tensor, "A0"]]:
    """Return (slots to write, mask over `path.active`): active sequences on live slots."""
    chosen = slots.long()[path.active]
    live = chosen >= 0
    return chosen[live], live
