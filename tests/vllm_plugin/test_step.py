"""Rows of the engine's steps: kept where they belong, folded when they must be, and never anybody else's."""

import numpy as np
import pytest
import torch

from treewy.vllm_plugin.check import materialised
from treewy.vllm_plugin.flush import flush_state
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.step import Drafted, Step
from vllm_plugin.rows import LAYERS, Engine, sizes

RECONSTRUCT, RING = 4, 16

# Of each step: requests, their pages, rows, tokens sampled.
STEPS = [
    ([0, 3], [2, 7], [4, 4], [3, 1]),
    ([3], [7], [4], [4]),  # 0 waits
    ([0, 3, 1], [2, 7, 5], [4, 2, 1], [2, 2, 1]),  # short chains, and a request that drafted nothing
    ([1, 0], [5, 2], [4, 4], [4, 4]),  # another order
    ([1, 0, 3, 4], [5, 2, 7, 1], [4, 4, 4, 4], [1, 4, 4, 0]),  # none sampled: a prompt's token that more will follow
    ([4, 1, 0, 3], [1, 5, 2, 7], [4, 4, 4, 4], [2, 1, 3, 4]),
    ([0, 3, 4, 1], [2, 7, 1, 5], [4, 4, 4, 4], [1, 1, 1, 1]),
]


@pytest.mark.parametrize("kept_rows", [RECONSTRUCT, 5, RING])
@pytest.mark.parametrize("padding", [0, 2])
def test_states_are_those_of_the_walk(kept_rows, padding):
    engine = Engine(kept_rows)
    for step in STEPS:
        engine.run(*step, padding=padding)
        assert all(output.isfinite().all() for output in engine.outputs)
    # All requests but those of their first step, in every layer.
    assert engine.checker.num_checks == LAYERS * (sum(len(step[0]) for step in STEPS) - 4)
    assert engine.checker.largest < 1e-6


def test_policies_agree():
    engines = [Engine(kept_rows) for kept_rows in (RECONSTRUCT, RING)]
    for step in STEPS:
        for engine in engines:
            engine.run(*step)
    for ours, theirs in zip(*(engine.outputs for engine in engines), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    states = [engine.states for engine in engines]
    assert not torch.allclose(*states)  # the ring's lie behind


def test_an_index_that_another_request_gets():
    engine = Engine(RING)
    engine.run([0, 3], [2, 7], [4, 4], [3, 4])
    engine.forget(3)
    assert engine.memory.lengths.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    fresh = engine.states[:, 8].clone()
    engine.run([3], [8], [4], [1])
    assert torch.equal(engine.states[:, 8], fresh)  # the rows of the one before did not go into it
    engine.run([0, 3], [2, 8], [4, 4], [1, 1])
    assert engine.checker.largest < 1e-6


def test_nobody_keeps_rows_of_a_dummy_batch():
    engine = Engine(RECONSTRUCT)
    engine.run([0], [2], [4], [2])
    before = [part.clone() for part in (engine.memory.lengths, engine.states)]
    engine.step.begin(Drafted(np.arange(2), np.full(2, -1, np.int32), np.array([4, 4], np.int32)), 2, 8)
    tables = engine.step.tables
    assert tables is not None
    assert tables.places.tolist() == [-1, -1]
    assert tables.fold.tolist() == [0, 0]
    engine.run([0], [2], [4], [1])
    assert engine.checker.largest < 1e-6
    assert all(
        torch.equal(now, then) is False
        for now, then in zip((engine.memory.lengths, engine.states), before, strict=True)
    )


def test_only_the_drafted_part_of_a_batch_is_kept():
    """Fault A09: the engine's batch has requests that prefill between those that verify."""
    memory = Memory(sizes(RECONSTRUCT), "cpu")
    step = Step(memory, "eager")
    step.begin(Drafted(np.array([0, 2]), np.array([4, 1], np.int32), np.array([4, 4], np.int32)), 2, 8)
    memory.step.u.copy_(torch.arange(memory.step.u.shape[1])[None, :, None, None].expand_as(memory.step.u))
    step.finish(torch.tensor([3, 1, 2]))
    assert memory.lengths.tolist() == [0, 2, 0, 0, 3, 0, 0, 0]
    assert memory.kept.u[0, 4, :3, 0, 0].tolist() == [0, 1, 2]
    assert memory.kept.u[LAYERS - 1, 1, :2, 0, 0].tolist() == [4, 5]
    assert np.flatnonzero(step.keeps).tolist() == [1, 4]


def test_tables_of_full_chains_are_written_again_after_others():
    """Fault C07: padding behind them has no rows, before and after."""
    step = Step(Memory(sizes(RECONSTRUCT), "cpu"), "eager")
    for rows in ([4, 4], [1, 3], [4, 4]):
        step.begin(Drafted(np.arange(2), np.arange(2, dtype=np.int32), np.array(rows, np.int32)), 3, sum(rows) + 2)
        tables = step.tables
        assert tables is not None
        assert tables.tree.cu_rows.tolist() == [0, rows[0], sum(rows), sum(rows)]
        assert tables.tree.parents[: sum(rows)].tolist() == [place - 1 for count in rows for place in range(count)]
        places = [place for count in rows for place in range(count)]
        assert tables.tree.ancestors[: sum(rows), 0].tolist() == [2 ** (place + 1) - 1 for place in places]


@pytest.mark.parametrize("kept_rows", [RECONSTRUCT, RING])
def test_flush_brings_pages_up_to_date(kept_rows):
    engine = Engine(kept_rows)
    for step in STEPS[:4]:
        engine.run(*step)
    requests, slots = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32)

    class Layer:
        A_log, dt_bias = engine.gates

    for layer in range(LAYERS):
        state, kept = engine.states[layer], engine.memory.kept.layer(layer)
        want = [
            materialised(state[slot].double(), kept, int(place)) for slot, place in zip(slots, requests, strict=True)
        ]
        others = state[[0, 1, 2, 3, 4, 6, 8]].clone()
        flush_state(state, slots, kept, requests, Layer, "eager")
        assert torch.allclose(state[slots.long()].double(), torch.stack(want), atol=1e-6)
        assert torch.equal(state[[0, 1, 2, 3, 4, 6, 8]], others)
    assert engine.memory.lengths[[3, 1]].ne(0).all()  # the caller forgets


def test_bytes_are_those_of_the_buffers():
    """Fault J02: rows of requests and of a step, and nothing for pages."""
    memory = Memory(sizes(RING), "cpu")
    given = memory.sizes
    rows = given.num_layers * (given.num_step_rows + given.num_requests * given.kept_rows)
    assert memory.num_bytes == rows * given.row_bytes + 4 * given.num_requests


def test_decays_are_in_float32_whatever_the_default():
    """Models are built under a default dtype of their own, in which decays would lose their digits."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        memory = Memory(sizes(RING), "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {part.dtype for part in (*memory.step, *memory.kept[:4])} == {torch.float32}


def test_a_wrong_row_is_found_by_the_checker():
    engine = Engine(RECONSTRUCT)
    engine.run(*STEPS[0])
    engine.memory.kept.u[1, 0, 0] *= 1.001
    engine.run(*STEPS[0])
    assert engine.checker.largest > 1e-5
