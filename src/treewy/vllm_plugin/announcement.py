"""The start-up log: what fits, and what the plugin keeps beside it."""

import logging
from typing import Any

from treewy.vllm_plugin.accounting import Rows, account, log_lines, read_layout

# Below vLLM's own logger, whose handlers and format it takes.
logger = logging.getLogger("vllm.treewy")


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
    bounds = {"drafts": sizes.step_rows - 1, "max_model_len": max_model_len, "available": available}
    for line in log_lines(account(blocks, rows, shared.options, **bounds)):
        logger.info(line)
