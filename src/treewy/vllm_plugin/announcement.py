"""The start-up log: what fits, and what the plugin keeps beside it."""

import logging
from typing import Any

from treewy.vllm_plugin.accounting import Rows, account, log_lines, read_layout

# Below vLLM's own logger, whose handlers and format it takes.
logger = logging.getLogger("vllm.treewy")


def announce_rows(num_bytes: int, num_requests: int) -> None:
    """Log what rows take, before they are allocated: whatever fails at start-up for want of memory, this is known by then."""
    logger.info(
        "treewy: taking %s bytes for rows of %s requests, the most that run at once", f"{num_bytes:,}", num_requests
    )


def announce(shared: Any, kv_cache_config: Any, max_model_len: int) -> None:
    """Log the arithmetic of an engine's memory; nothing where its blocks are of a kind that we do not count.

    Args:
        shared: What the plugin's layers share.
        kv_cache_config: vLLM's, of the blocks that requests run on.
        max_model_len: Longest context of a request.
    """
    blocks, sizes = read_layout(kv_cache_config), shared.memory.sizes
    if blocks is None:
        return
    rows = Rows(sizes.num_layers, sizes.row_bytes, sizes.num_requests, sizes.kept_rows, sizes.num_step_rows)
    available = kv_cache_config.num_blocks * blocks.block_bytes
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    counted = account(
        blocks,
        rows,
        shared.options,
        drafts=sizes.step_rows - 1,
        max_model_len=max_model_len,
        available=available,
        prefix_caching=any(getattr(spec, "mamba_cache_mode", "none") == "align" for spec in specs),
    )
    for line in log_lines(counted):
        logger.info(line)
