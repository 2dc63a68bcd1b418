"""What both tested versions of vLLM have alike, in terms of the objects that they share; imports nothing of vLLM."""

import dataclasses
from typing import Any

import numpy as np

from treewy.shapes import Float, Int, Tensor

# What vLLM's copies between pages know of each window and state.
COLUMNS = (
    *("state_base_addrs", "state_block_strides", "state_elem_sizes", "state_inner_sizes", "state_conv_widths"),
    *("state_group_indices", "state_dim_row_count", "state_dim_row_stride"),
)


def padded_tails(batch: Any) -> Int[np.ndarray, "B"]:
    """Return which requests of a batch run the last token of their prompt and nothing behind it but placeholders.

    vLLM pads such a token to the rows of a draft, for the sake of captured graphs. Placeholders are rejected, but only
    the drafted path can leave them out of a state.
    """
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return np.zeros(0, np.intp)
    sizes = batch.num_scheduled_tokens[: batch.num_reqs]
    return np.flatnonzero(batch.is_prefilling_np & (drafts > 0) & (sizes == drafts + 1))


def unwritten_rows(batch: Any) -> Int[np.ndarray, "B"]:
    """Return which requests of a batch begin with one token: vLLM runs it like one that decodes, from what is in its page.

    It may come alone, or with placeholders behind it.
    """
    begins = batch.is_prefilling_np & (batch.num_computed_tokens_np[: batch.num_reqs] == 0)
    alone = np.flatnonzero(begins & (batch.num_scheduled_tokens[: batch.num_reqs] == 1))
    tails = padded_tails(batch)
    return np.union1d(alone, tails[begins[tails]])


def one_state_per_request(spec: Any) -> Any:
    """Return a layer's cache spec without the blocks that hold a state per draft."""
    return dataclasses.replace(spec, num_speculative_blocks=0)


def state_of(layer: Any) -> Float[Tensor, "S HV V K"]:
    """Return the states of a layer's pages. On a CPU vLLM keeps [K, V] in memory that it declares [V, K]."""
    states = layer.kv_cache[1]
    if states.is_cuda:
        return states
    slots, heads, value_dim, key_dim = states.shape
    return states.view(slots, heads, key_dim, value_dim).transpose(-1, -2)


def pages_of(kv_cache: Tensor, head_dim: int) -> tuple[Float[Tensor, "X L HK E"], Float[Tensor, "X L HK E"]]:
    """Return the pools of keys and of values of an attention layer, which vLLM keeps heads first and side by side."""
    keys, values = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


def conv_weight(layer: Any) -> Float[Tensor, "C W"]:
    """Return the taps of a layer's convolution; vLLM packs them anew on a CPU, and keeps the old ones beside."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return layer.conv1d.weight.flatten(1) if weight is None else weight


def split_copies(copies: Any) -> tuple[Any, Any]:
    """Return vLLM's copies between pages for convolution windows alone, and for states alone."""
    return tuple(_subset(copies, chosen) for chosen in (copies.state_conv_widths > 0, copies.state_conv_widths == 0))


def _subset(copies: Any, chosen: Tensor) -> Any:
    columns = {name: getattr(copies, name)[chosen] for name in COLUMNS}
    count = int(chosen.sum())
    if hasattr(copies, "num_states"):
        return dataclasses.replace(copies, **columns, num_states=count)
    return dataclasses.replace(copies, **columns, num_layers=count, num_state_types=1)
