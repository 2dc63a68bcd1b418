"""Reading and writing pool slots, where slot -1 is inert."""

import torch

from treewy.errors import CapacityError
from treewy.packed import PackedPath, PackedTree, TreeTables
from treewy.shapes import Bool, Int, Tensor

INERT = -1


def check_slots(slots: Int[Tensor, "B"], num_slots: int, *, what: str = "slot") -> bool:
    """Check that slots lie in -1..num_slots-1 and that no two sequences share one; return whether none is inert.

    `what` names them in messages.

    Raises:
        CapacityError: a slot is out of range or taken twice.
    """
    given = slots.tolist()
    live = [slot for slot in given if slot != -1]
    bad = [slot for slot in live if not 0 <= slot < num_slots]
    if bad:
        raise CapacityError(
            f"A {what} must be -1 or lie in 0..{num_slots - 1}; got {bad[0]} in {given}. Allocate it first."
        )
    if len(set(live)) != len(live):
        raise CapacityError(f"Two sequences must not share a {what}; got {given}. Allocate one {what} per sequence.")
    return len(live) == len(given)


def gather_slots(pool: Tensor, slots: Int[Tensor, "B"], *, all_live: bool = False) -> Tensor:
    """Return pool[slots], zeros for slot -1 whatever slot 0 holds. `all_live` says that there is none."""
    if all_live:
        return pool.index_select(0, slots)
    live = slots >= 0
    gathered = pool[slots.clamp(min=0).long()]
    return torch.where(
        live.view(-1, *[1] * (pool.ndim - 1)), gathered, torch.zeros((), dtype=pool.dtype, device=pool.device)
    )


def zero_inert(rows: Tensor, slots: Int[Tensor, "B"], tree: PackedTree, *, all_live: bool) -> Tensor:
    """Return packed rows [N, ...] with zeros where no sequence on a live slot owns the row."""
    if all_live and tree.starts[-1] == tree.num_rows:
        return rows
    live = live_rows(slots, tree).view(-1, *[1] * (rows.ndim - 1))
    return torch.where(live, rows, rows.new_zeros(()))


def live_rows(slots: Int[Tensor, "B"], tree: PackedTree | TreeTables) -> Bool[Tensor, "N"]:
    """Return which packed rows belong to a sequence on a live slot."""
    seq = tree.seq_of_row
    if tree.num_seqs == 0:
        return torch.zeros_like(seq, dtype=torch.bool)
    return (seq >= 0) & (slots[seq.clamp(min=0)] >= 0)


def written(
    slots: Int[Tensor, "B"], path: PackedPath, *, all_live: bool
) -> tuple[Int[Tensor, "A"], Bool[Tensor, "A0"] | None]:
    """Return (slots to write, mask over `path.active`): active sequences on live slots. None keeps all of them."""
    chosen = slots.long() if path.is_full else slots.long()[path.active]
    if all_live:
        return chosen, None
    live = chosen >= 0
    return chosen[live], live


def kept(rows: Tensor, live: Bool[Tensor, "A0"] | None) -> Tensor:
    """Return the entries of active sequences that `written` keeps."""
    return rows if live is None else rows[live]
