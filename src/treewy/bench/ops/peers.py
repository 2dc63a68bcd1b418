"""Other projects' kernels, timed in the same process where they can be imported; nothing here needs them.

Each peer is given the rows of the problem it stands beside, as many sets of them, and a pool of its own, filled with
numbers of the same size. What the peers cannot do is left out: their shapes are chains of equal length.
"""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from treewy.bench.ops.cycle import CAPACITY, u_cache_bases, u_cache_cycle
from treewy.bench.ops.floors import state_bytes
from treewy.bench.ops.problems import NUM_HISTORY_ROWS, Problem
from treewy.bench.ops.timing import Call, Prepared
from treewy.errors import BackendError
from treewy.ops.gdn import Projections
from treewy.shapes import Float, Tensor

VLLM = "vLLM snapshot verify"
SGLANG = "sglang snapshot verify"
REPLAY = "sglang ReplaySSM verify"
U_CACHE = "FlashInfer u-cache verify"
U_CACHE_CYCLE = "FlashInfer u-cache cycle"

# Places of FlashInfer's ring that folds; its window is CAPACITY rows of them.
U_CACHE_PLACES = 32


class _Pools(NamedTuple):
    """A pool and where each set's sequences live in it."""

    state: Tensor
    slots: list[Tensor]


def prepare(name: str, problem: Problem) -> Prepared:
    """Return the calls of a peer.

    Raises:
        BackendError: it cannot be imported here.
    """
    return PEERS[name](problem)


def vllm_snapshots(problem: Problem) -> Prepared:
    """vLLM's served verify: the state after every row is written to a slot of its own; it goes on from an accepted one."""
    update = _import("vllm.third_party.flash_linear_attention.ops", "fused_sigmoid_gating_delta_rule_update")
    pools, seqs, size = _pools(problem, _num_rows(problem)), problem.case.batch_size, _num_rows(problem)
    bounds, accepted = _bounds(problem), torch.randint(1, size + 1, (seqs,), device=problem.state.device).int()

    def call(x: Projections, slots: Tensor) -> Call:
        return lambda: update(
            **_gates(x),
            **_batched(x),
            initial_state=pools.state,
            inplace_final_state=True,
            cu_seqlens=bounds,
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )

    calls = [call(x, slots.view(seqs, size)) for x, slots in zip(_rows(problem), pools.slots, strict=True)]
    return Prepared(calls, _state_bytes(problem) * size)


def sglang_snapshots(problem: Problem) -> Prepared:
    """sglang's recurrent verify: the state after every row is written to a buffer; the committed state stays."""
    module = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
    update = _import(module, "fused_sigmoid_gating_delta_rule_update")
    pools, size, bounds = _pools(problem), _num_rows(problem), _bounds(problem)
    num_slots = len(pools.state)
    snapshots = torch.empty((num_slots, size, *pools.state.shape[1:]), dtype=pools.state.dtype, device=bounds.device)

    def call(x: Projections, slots: Tensor) -> Call:
        return lambda: update(
            **_gates(x),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            **_batched(x),
            initial_state_source=pools.state,
            initial_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
            disable_state_update=True,
            intermediate_states_buffer=snapshots,
            intermediate_state_indices=slots,
            cache_steps=size,
        )

    return Prepared(list(map(call, _rows(problem), pools.slots)), _state_bytes(problem) * (1 + size))


def sglang_replay(problem: Problem) -> Prepared:
    """sglang's ReplaySSM verify: read-only over a checkpoint and 8 cached rows, without what its fold would need."""
    decode = _import("sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode", "gdn_replayssm_spec_decode")
    pools, size, bounds = _pools(problem), _num_rows(problem), _bounds(problem)
    num_slots, device = len(pools.state), problem.state.device
    keys, values, decays = _cached_rows(problem, num_slots, CAPACITY)
    held = torch.full((num_slots,), NUM_HISTORY_ROWS, device=device, dtype=torch.int32)
    base, flush = torch.zeros_like(held), torch.zeros_like(held, dtype=torch.int8)
    out = torch.empty_like(problem.steps[0].rows.v)

    def call(x: Projections, slots: Tensor) -> Call:
        raw = (None, None, None)
        cursors = (slots, slots, held, base, flush)
        operands = (x.q, x.k, x.v, x.a, x.b, x.a_log, x.dt_bias, pools.state, values, keys, decays)
        return lambda: decode(*operands, *raw, out, bounds, *cursors, CAPACITY, size, launch_mode="verify")

    return Prepared(list(map(call, _rows(problem), pools.slots)), _state_bytes(problem) + _bytes(keys, values, decays))


def u_cache(problem: Problem) -> Prepared:
    """FlashInfer's u-cache verify: read-only over a checkpoint and 8 cached rows; its rows join the cache."""
    update = _import("flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache", "gated_delta_rule_mtp_ucache")
    pools, (device, seqs) = _pools(problem), (problem.state.device, problem.case.batch_size)
    keys, values, decays = _cached_rows(problem, len(pools.state), CAPACITY)
    held = torch.full((seqs,), NUM_HISTORY_ROWS, device=device, dtype=torch.int32)
    gates = {"A_log": problem.steps[0].rows.a_log, "dt_bias": problem.steps[0].rows.dt_bias}

    def call(x: Projections, slots: Tensor) -> Call:
        operands = _by_sequence(x, seqs)
        out = torch.empty_like(operands["v"])
        return lambda: update(
            **gates,
            **operands,
            initial_state_source=pools.state,
            initial_state_indices=slots,
            k_cache=keys,
            u_cache=values,
            g_cache=decays,
            hist_len=held,
            output=out,
        )

    return Prepared(list(map(call, _rows(problem), pools.slots)), _state_bytes(problem) + _bytes(keys, values, decays))


def u_cache_steps(problem: Problem) -> Prepared:
    """FlashInfer's own cycle on the same accepted lengths: each launch folds the sequences that could overfill the cache."""
    update = _import("flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush", "gated_delta_rule_mtp_ucache_flush")
    assert problem.accepted is not None
    pools, seqs, device = _pools(problem), problem.case.batch_size, problem.state.device
    keys, values, decays = _cached_rows(problem, len(pools.state), U_CACHE_PLACES)
    cycle = u_cache_cycle(problem.accepted, _num_rows(problem))
    bases = u_cache_bases(cycle, U_CACHE_PLACES)[-len(cycle.last_steps.lengths) :]
    gates = {"A_log": problem.steps[0].rows.a_log, "dt_bias": problem.steps[0].rows.dt_bias}
    operands = [_by_sequence(x, seqs) for x in _rows(problem)]
    outs = [torch.empty_like(x["v"]) for x in operands]

    def call(number: int, held: np.ndarray, base: np.ndarray) -> Call:
        at = slice(number * seqs, (number + 1) * seqs)
        cursors = [torch.from_numpy(x[at]).to(device, torch.int32) for x in (held, base)]
        return (
            lambda: update(
                **gates,
                **operands[number],
                initial_state_source=pools.state,
                initial_state_indices=pools.slots[number],
                k_cache=keys,
                u_cache=values,
                g_cache=decays,
                hist_len=cursors[0],
                cache_base=cursors[1],
                restart_hist_on_flush=False,  # a serving engine moves the cursors once for all layers, outside this launch
                output=outs[number],
            )
        )

    steps = zip(cycle.last_steps.lengths, bases, strict=True)
    calls = [call(number, held, base) for held, base in steps for number in range(problem.num_sets)]
    return Prepared(calls, _state_bytes(problem) + _bytes(keys, values, decays))


PEERS: dict[str, Callable[[Problem], Prepared]] = {
    VLLM: vllm_snapshots,
    SGLANG: sglang_snapshots,
    REPLAY: sglang_replay,
    U_CACHE: u_cache,
    U_CACHE_CYCLE: u_cache_steps,
}


def _import(module: str, name: str) -> Any:
    try:
        # What they log goes to the stdout of their import: results are there.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # theirs to heed: a caller that turns warnings into errors times them as well
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library it loads is not there
        raise BackendError(
            f"A peer must be importable to be timed; {module}.{name} is not: {type(error).__name__}: {error}. Put it on "
            "the path, or pass --no-peers."
        ) from error


def _pools(problem: Problem, slots_per_seq: int = 1) -> _Pools:
    """Return a pool with so many slots per sequence and set, in random order; slot 0 is nobody's to vLLM and sglang."""
    per_set, device = problem.case.batch_size * slots_per_seq, problem.state.device
    num_slots = problem.num_sets * per_set
    state = torch.empty((num_slots + 1, *problem.state.shape[1:]), dtype=problem.state.dtype, device=device)
    for slot in state:
        slot.normal_(std=0.1)
    order = torch.randperm(num_slots, device=device).int() + 1
    return _Pools(state, [x.clone() for x in order.view(problem.num_sets, per_set)])


def _cached_rows(problem: Problem, num_slots: int, places: int) -> tuple[Tensor, Tensor, Float[Tensor, "S HV P"]]:
    """Return unit keys, pseudo-values and falling log decays of cached rows, heads before rows as the peers have them."""
    heads, io, device = problem.case.heads, problem.case.io, problem.state.device
    keys = torch.randn(num_slots, heads.num_heads, places, heads.key_dim, device=device)
    values = torch.randn(num_slots, heads.num_value_heads, places, heads.value_dim, device=device, dtype=io)
    decays = -torch.rand(num_slots, heads.num_value_heads, places, device=device).cumsum(-1)
    return functional.normalize(keys, dim=-1).to(io), values, decays


def _rows(problem: Problem) -> list[Projections]:
    """Return the rows of each set."""
    return [step.rows for step in problem.steps[: problem.num_sets]]


def _num_rows(problem: Problem) -> int:
    """Return the rows of each sequence; the peers' shapes are chains of one length."""
    return problem.tree.max_size


def _bounds(problem: Problem) -> Tensor:
    return problem.tree.cu_rows.int()


def _gates(x: Projections) -> dict[str, Tensor]:
    return {"A_log": x.a_log, "a": x.a, "b": x.b, "dt_bias": x.dt_bias}


def _batched(x: Projections) -> dict[str, Tensor]:
    """Return q, k and v under a batch axis of 1, as variable lengths want them."""
    return {"q": x.q[None], "k": x.k[None], "v": x.v[None]}


def _by_sequence(x: Projections, num_seqs: int) -> dict[str, Tensor]:
    """Return the rows as [sequences, rows, ...]."""
    return {name: getattr(x, name).unflatten(0, (num_seqs, -1)) for name in ("q", "k", "v", "a", "b")}


def _state_bytes(problem: Problem) -> int:
    return state_bytes(problem.case.heads, problem.case.state.itemsize)


def _bytes(*pools: Tensor) -> int:
    """Return the bytes of one slot of all pools."""
    return sum(x[0].numel() * x.element_size() for x in pools)
