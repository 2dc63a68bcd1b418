"""What verify keeps of each row, and what is kept of rows that are committed."""

from typing import NamedTuple

from treewy.shapes import Float, Int, Tensor


class Record(NamedTuple):
    """What `verify` keeps of each row so that any path can be committed: pseudo-values, keys and log decays.

    The log decay from the committed state to a row is `decay_high + decay_low`: one float32 loses the small gates that
    follow a strong one.
    """

    u: Float[Tensor, "N HV V"]
    k: Float[Tensor, "N H K"]
    decay_high: Float[Tensor, "N HV"]
    decay_low: Float[Tensor, "N HV"]


class History(NamedTuple):
    """Rows that are committed but not in the state yet: with it, a pool's state is a checkpoint.

    Each slot holds its `lengths[slot]` oldest rows first, of C places; the places behind them are never read. The log
    decay from the checkpoint to a row is `decay_high + decay_low`. The ops that write a history keep its lengths.
    """

    u: Float[Tensor, "S C HV V"]
    k: Float[Tensor, "S C H K"]
    decay_high: Float[Tensor, "S C HV"]
    decay_low: Float[Tensor, "S C HV"]
    lengths: Int[Tensor, "S"]

    @property
    def num_rows(self) -> int:
        """Rows that each slot has places for (C)."""
        return self.u.shape[1]


class Snapshots(NamedTuple):
    """What `verify_snapshots` keeps: the whole state after each row."""

    states: Float[Tensor, "N HV V K"]


class Verified(NamedTuple):
    """Outputs of each row, and what commit needs."""

    o: Float[Tensor, "N HV V"]
    record: Record | Snapshots
