"""How vLLM counts the memory of a hybrid: pages, blocks and groups, as its start-up log reports them.

vLLM gives every layer pages of one size. The attention block grows until its page holds a recurrent layer's page: the
state, the convolution window with a column per draft, and whatever a policy keeps beside them. Layers form groups of
equal size; a group that lacks layers is padded. A request takes whole blocks: as many as its tokens need in each
attention group, and one per state, pending ones included, in each recurrent group.
"""

from fractions import Fraction
from typing import NamedTuple

from treewy.planner.memory import RING_CAPACITY
from treewy.planner.model import ModelSpec
from treewy.planner.weights import DTYPE_BYTES

# Tokens that a block size is a multiple of.
ALIGNMENT = 16
# With fewer than this many layers of the commoner kind per layer of the rarer, all groups are as large as it.
PADDING_FACTOR = 1.5


class Layout(NamedTuple):
    """Blocks of one model under one policy, on one GPU.

    Attributes:
        block_size: Tokens of an attention block.
        state_bytes: What a recurrent layer's page must hold.
        page_bytes: Bytes of every layer's page, padding included.
        group_size: Layers of every group, padding included.
        num_attention_groups: Groups of softmax layers.
        num_state_groups: Groups of recurrent layers.
        states_per_request: Blocks of each recurrent group that a request takes.
    """

    block_size: int
    state_bytes: int
    page_bytes: int
    group_size: int
    num_attention_groups: int
    num_state_groups: int
    states_per_request: int

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all layers of a group."""
        return self.page_bytes * self.group_size

    def num_blocks(self, available: int) -> int:
        """Return the blocks that fit into `available` bytes."""
        return max(0, available // self.block_bytes)

    def blocks_per_request(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` tokens takes."""
        return (
            self.num_attention_groups * _ceil(num_tokens, self.block_size)
            + self.num_state_groups * self.states_per_request
        )

    def concurrency(self, num_blocks: int, num_tokens: int) -> Fraction:
        """Return how many requests of `num_tokens` tokens the blocks hold, fractions of one included."""
        return Fraction(num_blocks, self.blocks_per_request(num_tokens))

    def kv_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Return the "KV cache size" of the log: `max_model_len` tokens for each request that fits."""
        return int(self.concurrency(num_blocks, max_model_len) * max_model_len)

    def requests(self, num_blocks: int, num_tokens: int) -> int:
        """Return how many whole requests of `num_tokens` tokens are resident at once."""
        return int(self.concurrency(num_blocks, num_tokens))


def layout(
    spec: ModelSpec,
    policy: str,
    *,
    drafts: int,
    dtype: str,
    state_dtype: str,
    ring_capacity: int = RING_CAPACITY,
) -> Layout:
    """Return vLLM's blocks for a policy.

    `store_all` is vLLM as it is. Under `reconstruct` and `ring` the page also holds records, pseudo-values and decays
    in float32 and keys in the model's dtype, and a request keeps one state.

    Args:
        spec: One GPU's share of the model.
        policy: One of `planner.memory.POLICIES`; "none" drafts nothing and has no head.
        drafts: Tokens drafted per step.
        dtype: Of windows, keys and values.
        state_dtype: Of recurrent states.
        ring_capacity: Accepted rows that `ring` keeps.
    """
    drafting = policy != "none"
    pending = drafts if drafting else 0
    record_rows = {"reconstruct": drafts + 1, "ring": drafts + 1 + ring_capacity}.get(policy, 0)
    state_bytes = _state_bytes(spec, pending, dtype, state_dtype) + record_rows * _record_bytes(spec, dtype)
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * DTYPE_BYTES[dtype]
    block_size = ALIGNMENT * _ceil(state_bytes, ALIGNMENT * token_bytes)
    attention_layers = spec.num_attention_layers + (spec.num_head_layers if drafting else 0)
    group_size = _group_size(attention_layers, spec.num_linear_layers)
    return Layout(
        block_size=block_size,
        state_bytes=state_bytes,
        page_bytes=block_size * token_bytes,
        group_size=group_size,
        num_attention_groups=_ceil(attention_layers, group_size),
        num_state_groups=_ceil(spec.num_linear_layers, group_size),
        states_per_request=1 + (drafts if policy == "store_all" else 0),
    )


def _state_bytes(spec: ModelSpec, pending: int, dtype: str, state_dtype: str) -> int:
    state = spec.num_value_heads * spec.value_dim * spec.key_dim * DTYPE_BYTES[state_dtype]
    return state + (spec.conv_width - 1 + pending) * spec.conv_channels * DTYPE_BYTES[dtype]


def _record_bytes(spec: ModelSpec, dtype: str) -> int:
    in_float32 = spec.num_value_heads * spec.value_dim + spec.num_value_heads
    return in_float32 * DTYPE_BYTES["float32"] + spec.num_key_heads * spec.key_dim * DTYPE_BYTES[dtype]


def _group_size(*num_layers: int) -> int:
    fewest, most = min(x for x in num_layers if x), max(num_layers)
    return most if most < PADDING_FACTOR * fewest else fewest


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)
