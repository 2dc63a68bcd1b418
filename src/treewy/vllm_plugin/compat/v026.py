"""Private names of vLLM 0.26."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.compat import common
from treewy.vllm_plugin.compat.alike import *  # noqa: F403  (all of it is this version's too)


def drafted_rows(batch: Any) -> Int[np.ndarray, "B"]:
    """Return which requests of a batch verify: those that decode, whether or not they drafted."""
    drafted = np.flatnonzero(~batch.is_prefilling_np & (batch.num_scheduled_tokens[: batch.num_reqs] > 0))
    return np.union1d(drafted, common.padded_tails(batch))


def windows_race() -> bool:
    """Return whether vLLM's kernel for pages of full blocks changes what was accepted while it reads it; see `prefix`."""
    return True


def second_runner_with_the_fault() -> type | None:
    """Return the second model runner if it takes prompts for drafts; see `second_runner`."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return GPUModelRunner


def processed_logits(
    sampler: Any,
    logits: Float[Tensor, "N vocab"],
    batch: Any,
    requests: slice,
    rows: slice,
    positions: Int[Tensor, "N"],
    drafts: Int[Tensor, "N"],
) -> Float[Tensor, "N vocab"]:
    """Return logits as the requests' parameters change them.

    Args:
        sampler: vLLM's.
        logits: Of some rows.
        batch: Their batch.
        requests: The requests of these rows.
        rows: The rows, of all that have logits.
        positions: Position of each.
        drafts: Token of each.
    """
    return sampler.apply_sampling_params(
        logits,
        batch.expanded_idx_mapping[rows],
        batch.idx_mapping_np[requests],
        positions,
        drafts,
        batch.expanded_local_pos[rows],
    )


def sample(
    logits: Float[Tensor, "N vocab"],
    requests: Int[Tensor, "N"],
    temperature: Float[Tensor, "R"],
    seeds: Int[Tensor, "R"],
    positions: Int[Tensor, "N"],
    use_fp64: bool,
) -> Int[Tensor, "N"]:
    """Return a token of each row's law, from numbers that its request's seed and its position decide."""
    return gumbel_sample(logits, requests, temperature, seeds, positions, apply_temperature=False, use_fp64=use_fp64)
