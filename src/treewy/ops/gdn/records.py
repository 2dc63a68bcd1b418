"""What verify keeps of each row, and what is kept of rows that are committed."""

from typing import NamedTuple

from treewy.packed import PathTables
from treewy.shapes import Float, Int, Tensor


class Record(NamedTuple):
    """What `verify` keeps of each row so that any path can be committed: pseudo-values, keys and log decays.

    A row adds `u k^T` to the state. The serving entry keeps keys as they came and puts their norms into u.
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
    decay from the checkpoint to a row is `decay_high + decay_low`. The ops that write a history keep its lengths. To the
    serving entry a slot here may be another than that of the state: see `Prior.places`.
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


class StackedRecord(NamedTuple):
    """The records of a model's layers, one behind the other; `Record` says what they hold."""

    u: Float[Tensor, "L N HV V"]
    k: Float[Tensor, "L N H K"]
    decay_high: Float[Tensor, "L N HV"]
    decay_low: Float[Tensor, "L N HV"]

    def layer(self, i: int) -> Record:
        """Return a view of one layer's."""
        return Record(*(part[i] for part in self))


class StackedHistory(NamedTuple):
    """The histories of a model's layers, one behind the other, with the lengths that they share; see `History`."""

    u: Float[Tensor, "L S C HV V"]
    k: Float[Tensor, "L S C H K"]
    decay_high: Float[Tensor, "L S C HV"]
    decay_low: Float[Tensor, "L S C HV"]
    lengths: Int[Tensor, "S"]

    @property
    def num_rows(self) -> int:
        """Rows that each slot has places for (C)."""
        return self.u.shape[2]

    def layer(self, i: int) -> History:
        """Return a view of one layer's."""
        return History(self.u[i], self.k[i], self.decay_high[i], self.decay_low[i], self.lengths)


class Snapshots(NamedTuple):
    """What `verify_snapshots` keeps: the whole state after each row."""

    states: Float[Tensor, "N HV V K"]


class Verified(NamedTuple):
    """Outputs of each row, and what commit needs."""

    o: Float[Tensor, "N HV V"]
    record: Record | Snapshots


class Projections(NamedTuple):
    """A layer's rows as the convolution and the gate projections leave them: no norms, no scale, no gates yet.

    `finish_gates`, `l2_normalise` and `scale_queries` say what the serving entry makes of them.
    """

    q: Float[Tensor, "N H K"]
    k: Float[Tensor, "N H K"]
    v: Float[Tensor, "N HV V"]
    a: Float[Tensor, "N HV"]
    b: Float[Tensor, "N HV"]
    a_log: Float[Tensor, "HV"]
    dt_bias: Float[Tensor, "HV"]
    beta_scale: float = 1.0


class Prior(NamedTuple):
    """Committed rows that the state lacks: each sequence's history, then the path that the last step accepted.

    Attributes:
        history: None under policies without one.
        record: Record of the step that the path was accepted in; None if nothing is pending.
        path: The accepted rows, as rows of `record`.
        fold: Per sequence: not 0 folds all prior rows into the state now; 0 reads them beside it, and appends the path's
            rows to the history. A sequence without a history folds whenever it has prior rows.
        held: History rows of each sequence, `history.lengths` at its place, gathered once for all layers: one load less to
            wait for. None lets the kernel look them up.
        places: Where each sequence's history lies among the histories, no place twice, where that is not its slot: there
            may then be fewer histories than states, or more. -1: the sequence has no history; nothing of one is read or
            written. A sequence whose slot is -1 is inert wherever its history lies. None: at `slots`.
    """

    history: History | None
    record: Record | None
    path: PathTables | None
    fold: Int[Tensor, "B"]
    held: Int[Tensor, "B"] | None = None
    places: Int[Tensor, "B"] | None = None
