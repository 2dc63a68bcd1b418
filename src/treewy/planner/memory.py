"""Memory of one sequence, in bytes, part by part and by commit policy: what treewy's own cache holds."""

from typing import NamedTuple

from treewy.errors import RequestError
from treewy.planner.model import ModelSpec
from treewy.planner.weights import DTYPE_BYTES

# Counts beyond it are slips of the finger, and their bytes may not fit a float.
LARGEST = 1 << 40
# Accepted rows that the ring policy keeps before it folds them into the state.
RING_CAPACITY = 16
# How many of them a layer holds: one int64.
HISTORY_LENGTH_BYTES = 8
POLICIES = ("none", "store_all", "reconstruct", "ring")


class PerSequence(NamedTuple):
    """Bytes of one sequence on one GPU.

    Attributes:
        state: Committed recurrent states.
        conv: Committed convolution windows.
        kv: The target's committed keys and values.
        draft_kv: The drafter's committed keys and values.
        stash: reconstruct's records of the tree's rows, and the rows' convolution inputs.
        snapshots: store_all's pending states, one per row.
        history: ring's accepted rows that are not yet in the state, and each layer's count of them.
        conv_inputs: The rows' convolution inputs; part of `stash`, and held by store_all as well.
        pending_kv: The rows' keys and values in the target, held until commit.
    """

    state: int
    conv: int
    kv: int
    draft_kv: int
    stash: int
    snapshots: int
    history: int
    conv_inputs: int
    pending_kv: int

    def totals(self) -> dict[str, int]:
        """Return the bytes of a sequence under each policy; "none" decodes without drafts."""
        none = self.state + self.conv + self.kv
        drafting = none + self.draft_kv + self.pending_kv
        reconstruct = drafting + self.stash
        store_all = drafting + self.snapshots + self.conv_inputs
        return dict(zip(POLICIES, (none, store_all, reconstruct, reconstruct + self.history), strict=True))


def per_sequence(
    spec: ModelSpec,
    *,
    rows: int,
    context: int,
    dtype: str,
    state_dtype: str,
    ring_capacity: int = RING_CAPACITY,
) -> PerSequence:
    """Return the memory of a sequence of `context` committed tokens while a tree of `rows` rows is pending.

    Args:
        spec: One GPU's share of the model.
        rows: Rows of the draft tree, root included (T); 1 drafts nothing.
        context: Committed tokens.
        dtype: Of windows, keys and values.
        state_dtype: Of recurrent states and snapshots.
        ring_capacity: Accepted rows that `ring` keeps.

    Raises:
        RequestError: a count is not positive, or beyond any memory.
    """
    for name, value in {"rows": rows, "context": context, "ring capacity": ring_capacity}.items():
        if value < 1:
            raise RequestError(f"{name} must be at least 1; got {value}. Raise it.")
        if value > LARGEST:
            raise RequestError(f"{name} must be at most {LARGEST}; got a number of {len(str(value))} digits. Lower it.")
    size, state_size = DTYPE_BYTES[dtype], DTYPE_BYTES[state_dtype]
    state = spec.num_linear_layers * spec.num_value_heads * spec.value_dim * spec.key_dim * state_size
    conv_row = spec.num_linear_layers * spec.conv_channels * size
    kv_row = 2 * spec.num_kv_heads * spec.head_dim * size
    record = spec.num_linear_layers * record_width(spec) * _compute_size(dtype, state_dtype)
    return PerSequence(
        state=state,
        conv=(spec.conv_width - 1) * conv_row,
        kv=context * spec.num_attention_layers * kv_row,
        draft_kv=context * spec.num_head_layers * kv_row if rows > 1 else 0,
        stash=rows * (record + conv_row),
        snapshots=rows * state,
        history=ring_capacity * record + spec.num_linear_layers * HISTORY_LENGTH_BYTES,
        conv_inputs=rows * conv_row,
        pending_kv=rows * spec.num_attention_layers * kv_row,
    )


def record_width(spec: ModelSpec) -> int:
    """Return the numbers that a layer records per row: pseudo-values, keys, and log decays in two parts."""
    return spec.num_value_heads * spec.value_dim + spec.num_key_heads * spec.key_dim + 2 * spec.num_value_heads


def _compute_size(dtype: str, state_dtype: str) -> int:
    # Records stay in the compute dtype, which is float32 unless something is float64.
    return DTYPE_BYTES["float64" if "float64" in (dtype, state_dtype) else "float32"]
