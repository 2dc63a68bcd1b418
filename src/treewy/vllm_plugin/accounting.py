"""The memory of an engine with the plugin and without it, as the start-up log states it: arithmetic, to the byte.

vLLM's blocks are counted by `planner.vllm`. With the plugin a page holds what it held before, one state and one
convolution window, but a request takes one block of each recurrent group instead of one per draft and one. Rows that are
not in a state yet lie beside the blocks, in buffers of a fixed size.
"""

from math import prod
from typing import Any, NamedTuple

from treewy.planner.model import ModelSpec
from treewy.planner.vllm import Layout, layout
from treewy.planner.weights import DTYPE_BYTES
from treewy.vllm_plugin.options import Options

# Of a row's log decay, in two parts, and of the count of a request's kept rows.
DECAY_BYTES, COUNT_BYTES = 2 * 4, 4


class Rows(NamedTuple):
    """Bytes that the plugin keeps beside vLLM's blocks, on one GPU.

    Attributes:
        num_layers: Gated DeltaNet layers (L).
        row_bytes: Of one row of one layer: pseudo-values, keys and decays.
        num_requests: Requests that may run at once.
        kept_rows: Accepted rows that each may keep outside its state (C).
        num_step_rows: Rows of all requests in one step.
    """

    num_layers: int
    row_bytes: int
    num_requests: int
    kept_rows: int
    num_step_rows: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, and of the requests' counts of them."""
        rows = self.num_requests * self.kept_rows + self.num_step_rows
        return self.num_layers * self.row_bytes * rows + COUNT_BYTES * self.num_requests

    def of_fewer(self, num_requests: int) -> "Rows":
        """Return the rows of an engine for fewer requests."""
        step_rows = self.num_step_rows // self.num_requests
        return self._replace(num_requests=num_requests, num_step_rows=num_requests * step_rows)


class Share(NamedTuple):
    """What vLLM's blocks hold.

    Attributes:
        blocks: Their layout.
        num_blocks: How many there are.
        blocks_per_request: Taken by a request of the longest context.
        kv_tokens: "GPU KV cache size" of vLLM's log.
        requests: Requests of the longest context that fit, "maximum concurrency" of the log.
    """

    blocks: Layout
    num_blocks: int
    blocks_per_request: int
    kv_tokens: int
    requests: float


class Account(NamedTuple):
    """One engine's memory, with the plugin and without it, the same bytes in all."""

    options: Options
    drafts: int
    max_model_len: int
    rows: Rows
    treewy: Share
    stock: Share


def rows_of(
    spec: ModelSpec,
    options: Options,
    *,
    drafts: int,
    max_num_seqs: int,
    dtype: str,
    state_dtype: str,
    num_step_rows: int | None = None,
) -> Rows:
    """Return what the plugin keeps beside the blocks.

    Args:
        spec: One GPU's share of the model.
        options: The engine's.
        drafts: Tokens drafted per step.
        max_num_seqs: Requests that run at once.
        dtype: Of the model.
        state_dtype: Of recurrent states; pseudo-values are bfloat16 beside bfloat16 states, else float32.
        num_step_rows: Rows of all requests in one step, if there are more than `max_num_seqs` trees have: padding.
    """
    u_bytes = DTYPE_BYTES["bfloat16" if state_dtype == "bfloat16" else "float32"]
    keys = spec.num_key_heads * spec.key_dim * DTYPE_BYTES[dtype]
    row_bytes = spec.num_value_heads * (spec.value_dim * u_bytes + DECAY_BYTES) + keys
    step_rows = max_num_seqs * (1 + drafts) if num_step_rows is None else num_step_rows
    return Rows(spec.num_linear_layers, row_bytes, max_num_seqs, options.kept_rows(1 + drafts), step_rows)


def predict_layout(spec: ModelSpec, *, drafts: int, dtype: str, state_dtype: str) -> Layout:
    """Return the blocks of a model whose drafter is its own head, before there is an engine."""
    return layout(spec, "store_all", drafts=drafts, dtype=dtype, state_dtype=state_dtype)


def read_layout(kv_cache_config: Any) -> Layout | None:
    """Return the blocks of a running engine from vLLM's `KVCacheConfig`, whoever drafts.

    None where its groups are not of layers with pages of one size, softmax or recurrent: then its blocks are of another kind.
    """
    groups = [(len(group.layer_names), group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    states = [spec for _, spec in groups if hasattr(spec, "num_speculative_blocks")]
    attention = [spec for _, spec in groups if hasattr(spec, "head_size")]
    pages = {spec.page_size_bytes for _, spec in groups}
    if not states or not attention or len(states) + len(attention) < len(groups) or len(pages) > 1:
        return None
    shapes = zip(states[0].shapes, states[0].dtypes, strict=True)
    return Layout(
        block_size=attention[0].block_size,
        state_bytes=sum(prod(shape) * dtype.itemsize for shape, dtype in shapes),
        page_bytes=pages.pop(),
        group_size=max(num_layers for num_layers, _ in groups),
        num_attention_groups=len(attention),
        num_state_groups=len(states),
        states_per_request=1 + states[0].num_speculative_blocks,
    )


def account(
    blocks: Layout,
    rows: Rows,
    options: Options,
    *,
    drafts: int,
    max_model_len: int,
    available: int,
    prefix_caching: bool = False,
) -> Account:
    """Return what fits, with the plugin and without it.

    Args:
        blocks: Blocks of the engine.
        rows: What lies beside them.
        options: The engine's.
        drafts: Tokens drafted per step.
        max_model_len: Longest context of a request.
        available: Bytes for blocks with the plugin; without it there would be those of the rows as well.
        prefix_caching: Whether prefixes are cached: then vLLM counts one state more, of the block that is being left.
    """
    ours, stock = (blocks._replace(states_per_request=n + prefix_caching) for n in (1, 1 + drafts))
    return Account(
        options=options,
        drafts=drafts,
        max_model_len=max_model_len,
        rows=rows,
        treewy=_share(ours, available, max_model_len),
        stock=_share(stock, available + rows.num_bytes, max_model_len),
    )


def log_lines(account: Account) -> list[str]:
    """Return the account as lines for the start-up log."""
    rows, ours, stock, widths = account.rows, account.treewy, account.stock, account.options.widths
    blocks, num_layers = ours.blocks, account.rows.num_layers
    pages = blocks.num_state_groups * blocks.group_size
    states = "1 block" if blocks.states_per_request == 1 else f"{blocks.states_per_request} blocks"
    drafts = f"{account.drafts} drafts" if widths is None else f"{account.drafts} drafts in a tree of {list(widths)}"
    return [
        f"treewy: {account.options.commit}, {drafts}: a request takes {states} of each "
        f"of {blocks.num_state_groups} recurrent groups instead of {stock.blocks.states_per_request}; {num_layers} layers "
        f"in {pages} pages, {pages - num_layers} of padding",
        f"treewy: {ours.num_blocks:,} blocks of {blocks.block_size:,} tokens and {blocks.block_bytes:,} bytes: "
        f"{blocks.group_size} pages of {blocks.page_bytes:,} bytes, {blocks.state_bytes:,} of them used by a state",
        f"treewy: {account.max_model_len:,} tokens take {ours.blocks_per_request} blocks instead of "
        f"{stock.blocks_per_request}: {ours.kv_tokens:,} KV tokens, {ours.requests:.2f} requests; without treewy "
        f"{stock.kv_tokens:,} and {stock.requests:.2f}",
        f"treewy: {rows.num_bytes:,} bytes of rows beside the blocks: {num_layers} layers of "
        f"{rows.num_requests:,} x {rows.kept_rows} kept rows and {rows.num_step_rows:,} of a step, {rows.row_bytes:,} bytes "
        "each",
        *_advice(rows, ours),
    ]


def _advice(rows: Rows, ours: Share) -> list[str]:
    """Return a line for an engine that keeps rows for more requests than its blocks can hold."""
    # A request runs with a block of each group: prefixes are shared, a last block and a state are not.
    blocks = ours.blocks._replace(states_per_request=1)

    def num_blocks(num_requests: int) -> int:
        freed = rows.num_bytes - rows.of_fewer(num_requests).num_bytes
        return ours.num_blocks + freed // blocks.block_bytes

    most = next((n for n in range(1, rows.num_requests) if blocks.requests(num_blocks(n), 1) <= n), None)
    if most is None or num_blocks(most) == ours.num_blocks:
        return []
    return [
        f"treewy: the blocks hold {most:,} requests at most, and there are rows for {rows.num_requests:,}: with --max-num-seqs "
        f"{most} there would be {num_blocks(most) - ours.num_blocks:,} blocks more"
    ]


def _share(blocks: Layout, available: int, max_model_len: int) -> Share:
    num_blocks = blocks.num_blocks(available)
    return Share(
        blocks,
        num_blocks,
        blocks.blocks_per_request(max_model_len),
        blocks.kv_tokens(num_blocks, max_model_len),
        float(blocks.concurrency(num_blocks, max_model_len)),
    )
