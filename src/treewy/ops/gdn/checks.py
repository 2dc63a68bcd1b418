"""What entry points of the gated delta rule check of what they share: states, histories, records."""

from treewy.errors import CapacityError, ShapeError
from treewy.ops.gdn.records import History, Record, StackedHistory
from treewy.ops.paths import check_path_rows
from treewy.ops.slots import check_slots
from treewy.packed import PathTables
from treewy.shapes import Tensor


def check_state(state: Tensor) -> None:
    """Check that a state is the pool of one layer.

    Raises:
        ShapeError: it is not [slots, heads, V, K].
    """
    if state.ndim != 4:
        raise ShapeError(f"state must be [slots, heads, V, K]; got {tuple(state.shape)}. Pass the pool of one layer.")


def check_history(history: History, state_shape: tuple[int, ...], num_heads: int) -> None:
    """Check that a history fits the state and the key heads.

    Raises:
        ShapeError: it does not, or has no rows.
    """
    num_slots, value_heads, value_dim, key_dim = state_shape
    rows = history.u.shape[1] if history.u.ndim > 1 else 0
    decay = (num_slots, rows, value_heads)
    expected = {
        "u": (num_slots, rows, value_heads, value_dim),
        "k": (num_slots, rows, num_heads, key_dim),
        "decay_high": decay,
        "decay_low": decay,
        "lengths": (num_slots,),
    }
    given = {name: tuple(part.shape) for name, part in history._asdict().items()}
    if given != expected or rows == 0 or num_heads == 0 or value_heads % num_heads:
        raise ShapeError(
            f"A history must have a row at least and fit the state and the key heads, {expected}; got {given}. Make it "
            "for the same pool."
        )


def check_record(record: Record, state_shape: tuple[int, ...], num_heads: int, num_rows: int) -> None:
    """Check that a record of `num_rows` rows fits the state and the key heads.

    Raises:
        ShapeError: it does not.
    """
    _, value_heads, value_dim, key_dim = state_shape
    decay = (num_rows, value_heads)
    expected = {
        "u": (num_rows, value_heads, value_dim),
        "k": (num_rows, num_heads, key_dim),
        "decay_high": decay,
        "decay_low": decay,
    }
    given = {name: tuple(part.shape) for name, part in record._asdict().items()}
    if given != expected or num_heads == 0 or value_heads % num_heads:
        raise ShapeError(
            f"A record must fit the tree and the state, {expected}; got {given}. Commit what verify returned for this "
            "tree."
        )


def check_room(history: StackedHistory, places: Tensor, path: PathTables, num_rows: int) -> None:
    """Check, on the host, that histories lie where they are said to and have room for their paths of a record's rows.

    Raises:
        ShapeError: a path is longer than its table, or has a row that the record lacks.
        CapacityError: a place is out of range or taken twice, or a history has no room.
    """
    check_slots(places, history.lengths.shape[0], what="place")
    check_path_rows(path, [(0, num_rows) if place >= 0 else None for place in places.tolist()])
    lengths = history.lengths.tolist()
    for place, accepted in zip(places.tolist(), path.lengths.tolist(), strict=True):
        if place >= 0 and lengths[place] + accepted > history.num_rows:
            raise CapacityError(
                f"A history must have room for its path; the one at {place} holds {lengths[place]} of {history.num_rows} rows "
                f"and the path has {accepted}. Fold it first."
            )
