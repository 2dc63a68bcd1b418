"""What both tested versions of vLLM have alike, in terms of the layer objects that they share."""

import dataclasses
from typing import Any

import numpy as np

from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.conv import chain_conv as eager_chain_conv

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
    """Return those of `padded_tails` whose pages nobody wrote yet: prompts of one token."""
    tails = padded_tails(batch)
    return tails[batch.num_computed_tokens_np[tails] == 0]


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


def window_of(layer: Any, *, dim_first: bool) -> Float[Tensor, "S C X"]:
    """Return the rolling windows of a layer's pages, channels first."""
    return layer.kv_cache[0] if dim_first else layer.kv_cache[0].transpose(-1, -2)


def chain_conv(
    layer: Any, metadata: Any, x: Float[Tensor, "N C"], max_rows: int, *, dim_first: bool, update: Any
) -> Float[Tensor, "N C"]:
    """Run the convolution of chains: vLLM's kernel on a GPU, ours elsewhere.

    Args:
        layer: The Gated DeltaNet layer.
        metadata: Its metadata.
        x: Rows of the sequences that drafted.
        max_rows: Rows of the longest chain. vLLM would take them from the table of states, which has one column only.
        dim_first: Whether windows lie channels first.
        update: vLLM's kernel.
    """
    window = window_of(layer, dim_first=dim_first)
    slots = metadata.spec_state_indices_tensor[:, 0]
    if x.is_cuda:
        weight = layer.conv1d.weight.view(layer.conv1d.weight.size(0), layer.conv1d.weight.size(2))
        return update(
            x,
            window,
            weight,
            layer.conv1d.bias,
            layer.activation,
            conv_state_indices=slots[: metadata.num_spec_decodes],
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=metadata.spec_query_start_loc,
            max_query_len=max_rows,
            validate_data=False,
        )
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    weight = layer.conv1d.weight.flatten(1) if weight is None else weight
    count = metadata.num_spec_decodes
    cu_rows = metadata.spec_query_start_loc[: count + 1]
    return eager_chain_conv(
        x, window, weight, layer.conv1d.bias, slots[:count], metadata.num_accepted_tokens[:count], cu_rows
    )


def split_copies(copies: Any) -> tuple[Any, Any]:
    """Return vLLM's copies between pages for convolution windows alone, and for states alone."""
    return tuple(_subset(copies, chosen) for chosen in (copies.state_conv_widths > 0, copies.state_conv_widths == 0))


def _subset(copies: Any, chosen: Tensor) -> Any:
    columns = {name: getattr(copies, name)[chosen] for name in COLUMNS}
    count = int(chosen.sum())
    if hasattr(copies, "num_states"):
        return dataclasses.replace(copies, **columns, num_states=count)
    return dataclasses.replace(copies, **columns, num_layers=count, num_state_types=1)
