"""Bytes that a step must move, whatever the kernel: the floor of its time is these over the copy bandwidth."""

from typing import NamedTuple

# A log decay or a finished gate of one value head.
FLOAT = 4


class Heads(NamedTuple):
    """Sizes of a Gated DeltaNet layer; the default is Qwen3.5-35B-A3B's."""

    num_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128


QWEN_35B = Heads()


class Work(NamedTuple):
    """What one call does, summed over its sequences; a mean where calls differ.

    Attributes:
        num_states: States read plus states written.
        num_rows: Rows verified: q, k, v and gates in, o and a record out.
        num_prior_rows: Records read or written beside these: history, accepted paths and what joins a history.
    """

    num_states: float
    num_rows: int
    num_prior_rows: float


def state_bytes(heads: Heads, element: int) -> int:
    """Return the bytes of one state of elements of `element` bytes."""
    return heads.num_value_heads * heads.value_dim * heads.key_dim * element


def record_bytes(heads: Heads, element: int, io: int = 2) -> int:
    """Return the bytes of one row's record: u in the state's dtype, k as it came, one log decay per value head."""
    values, keys = heads.num_value_heads * heads.value_dim, heads.num_heads * heads.key_dim
    return values * element + keys * io + heads.num_value_heads * FLOAT


def row_bytes(heads: Heads, io: int = 2) -> int:
    """Return the bytes of one row's q, k, v and o, and of its two gates in float32."""
    values, keys = heads.num_value_heads * heads.value_dim, heads.num_heads * heads.key_dim
    return 2 * (values + keys) * io + 2 * heads.num_value_heads * FLOAT


def floor_bytes(heads: Heads, work: Work, element: int, io: int = 2) -> float:
    """Return the bytes that one call must move.

    Args:
        heads: Sizes of the layer.
        work: What the call does.
        element: Bytes of an element of the state and of u.
        io: Bytes of an element of q, k, v and o.
    """
    record = record_bytes(heads, element, io)
    states, rows = work.num_states * state_bytes(heads, element), work.num_rows * (row_bytes(heads, io) + record)
    return states + rows + work.num_prior_rows * record
