"""The memory of one layer, for every slot of a pool."""

from typing import NamedTuple

import torch

from treewy.ops.gdn import History
from treewy.shapes import Tensor, lasting


class LinearSpec(NamedTuple):
    """Sizes of a gated-delta layer's memory."""

    num_key_heads: int
    num_value_heads: int
    value_dim: int
    key_dim: int
    conv_channels: int
    conv_width: int


class AttentionSpec(NamedTuple):
    """Sizes of a softmax layer's memory."""

    num_kv_heads: int
    head_dim: int


LayerSpec = LinearSpec | AttentionSpec


class LinearLayer:
    """Recurrent states [S, HV, V, K] and conv windows [S, W - 1, C], oldest input first.

    With a history, a slot's state is a checkpoint: the history's rows are committed, but not in it yet.

    Args:
        num_history_rows: Rows of each slot's history; 0 for none.
    """

    def __init__(
        self,
        spec: LinearSpec,
        num_slots: int,
        *,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device | str,
        num_history_rows: int = 0,
    ) -> None:
        shape = (num_slots, spec.num_value_heads, spec.value_dim, spec.key_dim)
        self.state = torch.zeros(shape, dtype=state_dtype, device=device)
        self.window = torch.zeros(num_slots, spec.conv_width - 1, spec.conv_channels, dtype=dtype, device=device)
        self.history: History | None = None
        if num_history_rows:
            # As records are: pseudo-values in bfloat16 would cost the state 2e-3.
            wide = torch.float64 if torch.float64 in (dtype, state_dtype) else torch.float32
            self.history = _empty_history(spec, num_slots, num_history_rows, wide, device)

    def tensors(self) -> list[Tensor]:
        """Return all its memory; the first axis of each is the slots."""
        return [self.state, self.window, *(self.history or ())]

    def state_bytes(self, slot: int) -> int:
        """Return the bytes of the slot's state, with its history."""
        return sum(x[slot].nbytes for x in (self.state, *(self.history or ())))

    def reset(self, slot: int) -> None:
        """Make `slot` the memory of an empty sequence."""
        self.state[slot] = 0
        self.window[slot] = 0
        if self.history is not None:
            self.history.lengths[slot] = 0

    def poison(self, slot: int) -> None:
        """Fill `slot` with NaN, and say that its history is full, so that any later read of it shows."""
        self.state[slot] = torch.nan
        self.window[slot] = torch.nan
        if self.history is not None:
            *rows, lengths = self.history
            for part in rows:
                part[slot] = torch.nan
            lengths[slot] = self.history.num_rows


class AttentionLayer:
    """Committed keys and values [S, M, HK, E]; places past a sequence's length are never read."""

    # Places are added this many at a time.
    BLOCK = 256

    def __init__(self, spec: AttentionSpec, num_slots: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (num_slots, 0, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def tensors(self) -> list[Tensor]:
        """Return all its memory; the first axis of each is the slots."""
        return [self.keys, self.values]

    @property
    def num_places(self) -> int:
        """Places of each slot (M)."""
        return self.keys.shape[1]

    def reserve(self, num_places: int, *, fill: float = 0.0) -> None:
        """Grow every slot to at least `num_places`, doubling so that growth costs little; new places hold `fill`."""
        if num_places <= self.num_places:
            return
        target = max(num_places, min(2 * self.num_places, num_places + 16 * self.BLOCK))
        target = -(-target // self.BLOCK) * self.BLOCK
        self.keys, self.values = (_grown(x, target, fill) for x in (self.keys, self.values))

    def reset(self, slot: int) -> None:
        """Nothing to do: an empty sequence has length 0."""

    def poison(self, slot: int) -> None:
        """Fill `slot` with NaN, so that any later read of it shows."""
        self.keys[slot] = torch.nan
        self.values[slot] = torch.nan


def _empty_history(
    spec: LinearSpec, num_slots: int, num_rows: int, dtype: torch.dtype, device: torch.device | str
) -> History:
    def zeros(*dims: int) -> Tensor:
        return torch.zeros(num_slots, num_rows, *dims, dtype=dtype, device=device)

    return History(
        u=zeros(spec.num_value_heads, spec.value_dim),
        k=zeros(spec.num_key_heads, spec.key_dim),
        decay_high=zeros(spec.num_value_heads),
        decay_low=zeros(spec.num_value_heads),
        lengths=torch.zeros(num_slots, dtype=torch.int64, device=device),
    )


@lasting
def _grown(pool: Tensor, num_places: int, fill: float) -> Tensor:
    grown = pool.new_full((pool.shape[0], num_places, *pool.shape[2:]), fill)
    grown[:, : pool.shape[1]] = pool
    return grown
