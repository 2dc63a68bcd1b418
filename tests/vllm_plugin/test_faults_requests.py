"""Reported faults of requests that come, leave and come again: whose places are free, and whose pages are as new."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.vllm_plugin import first_runner
from treewy.vllm_plugin.compat import common
from treewy.vllm_plugin.first_runner import Places
from treewy.vllm_plugin.state import model_state_class
from vllm_plugin.fakes import ModelState, compat
from vllm_plugin.rows import LAYERS
from vllm_plugin.test_first_runner import Shared, engine, finish, step
from vllm_plugin.test_state import NAMES, Worker

SLOTS = 8


def test_places_of_a_thousand_requests() -> None:
    """Fault C12: however requests join, end, are preempted, or are gone before they ran, each has a place of its own."""
    draw, shared, known = random.Random(4), Shared(), dict[str, bool]()
    places = Places(shared)
    for number in range(1000):
        if len(known) < SLOTS and draw.random() < 0.6:
            known[f"request {number}"] = draw.random() < 0.8
        for name, runs in known.items():
            if runs:
                shared.step.keeps[places.take(name, known)] = True
        if known and draw.random() < 0.5:
            name = draw.choice([*known])
            if draw.random() < 0.5:
                places.forget(name)  # preempted
            else:
                del known[name]
        places.drop(known)
        taken = places._of
        assert taken.keys() <= known.keys()
        assert len(set(taken.values())) == len(taken)
        assert np.flatnonzero(shared.step.keeps).tolist() == sorted(taken.values())
    places.drop({})
    assert not places._of
    assert not shared.step.keeps.any()


def test_indices_of_a_thousand_requests() -> None:
    """Fault C12: nothing is remembered of requests that left, also of those that were removed before they were added."""
    worker, draw, indices = Worker(), random.Random(5), dict[str, int]()
    for number in range(1000):
        if len(indices) < SLOTS and draw.random() < 0.6:
            name, index = f"request {number}", draw.choice([*set(range(SLOTS)) - set(indices.values())])
            worker.state.remove_request(name)
            worker.state.add_request(index, SimpleNamespace(req_id=name))
            indices[name] = index
            assert worker.engine.memory.lengths[index] == 0
            worker.engine.memory.lengths[index] = 3
            worker.step.keeps[index] = True
        if indices and draw.random() < 0.5:
            name = draw.choice([*indices])
            worker.state.remove_request(name)
            del indices[name]
        assert worker.state._index_of == indices


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_preempted_twice_in_a_row(rows: int) -> None:
    """Fault D04: what a step accepted that ran when its request was preempted is not there when it begins again."""
    worker, name = Worker(), SimpleNamespace(req_id="a")
    worker.state.remove_request("a")
    worker.state.add_request(1, name)
    for index in (1, 4):  # its own index again, then another's
        worker.verify([1, 0], [rows, 4], [True, True])
        worker.state.postprocess_state(torch.tensor([1, 0]), torch.tensor([rows, 2]))
        assert worker.engine.memory.lengths[1] == rows
        worker.state.remove_request("a")
        worker.state.remove_request("a")
        worker.state.add_request(index, name)
        assert worker.engine.memory.lengths[index] == 0
        assert worker.state.num_accepted_tokens_gpu[index] == 1
    assert worker.engine.memory.lengths[1] == rows  # until another request has that index
    worker.state.add_request(1, SimpleNamespace(req_id="b"))
    assert worker.engine.memory.lengths.tolist() == [4, *[0] * 7]


def tails() -> Any:
    """Return a batch: one that decodes, prompts' tails with placeholders and without, and prompts of other lengths."""
    prefilling, scheduled, drafts, computed = zip(
        *(
            (False, 4, 3, 20),
            (True, 4, 3, 16),
            (True, 4, 3, 0),
            (True, 1, 0, 16),
            (True, 4, 0, 0),
            (True, 9, 0, 16),
            (False, 1, 0, 30),
        ),
        strict=True,
    )
    return SimpleNamespace(
        num_reqs=7,
        is_prefilling_np=np.array(prefilling),
        num_scheduled_tokens=np.array([*scheduled, 5, 5]),  # and padding
        num_draft_tokens_per_req=np.array(drafts),
        num_computed_tokens_np=np.array(computed),
    )


def test_tails_that_are_padded() -> None:
    """Fault D05: a prompt's last token with placeholders behind it is told from a prompt of as many tokens."""
    batch = tails()
    assert common.padded_tails(batch).tolist() == [1, 2]
    assert common.unwritten_rows(batch).tolist() == [2]
    batch.num_draft_tokens_per_req = None
    assert not len(common.padded_tails(batch))
    assert not len(common.unwritten_rows(batch))


@pytest.mark.parametrize("align", [False, True])
def test_pages_of_prompts_of_one_token(align: bool) -> None:
    """Faults B06, C06 and D05: they verify at once, from pages that are empty, whatever another request left there."""
    worker = Worker(align=align)
    vllm = compat()
    vars(vllm)["unwritten_rows"] = lambda batch: np.array([2])
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(zip(NAMES, worker.layers, strict=True)))
    )
    worker.state = model_state_class(vllm)(config, align)
    worker.engine.states[:, 4], worker.windows[:, 4], worker.windows[:, 6] = torch.nan, torch.nan, torch.nan
    worker.engine.states[:, 6] = torch.nan
    states, windows = worker.engine.states.clone(), worker.windows.clone()
    tables = [
        torch.tensor([[2, 0], [3, 0], [page, 7]]) for page in (4, 5, 6)
    ]  # of each group; the second is attention's
    worker.preprocess(worker.batch([3, 5, 0], [4, 7, 4], [True, False, True]), tables)
    for layer, page in enumerate((4, 6, 6)):
        assert not worker.engine.states[layer, page].any()
        assert not worker.windows[layer, page].any()
        others = [slot for slot in range(9) if slot != page]
        for now, then in ((worker.engine.states, states), (worker.windows, windows)):
            assert torch.equal(now[layer, others].nan_to_num(), then[layer, others].nan_to_num())
    assert isinstance(worker.state, ModelState)


def test_the_first_runner_and_prompts_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults D01 and D05: a prompt's last token that comes alone verifies; one of several does not, and a first one
    finds an empty page."""
    shared, runner = engine()
    layers = [SimpleNamespace(prefix=name) for name in NAMES]
    cleared: list[Any] = []
    monkeypatch.setattr(first_runner, "layers_of", lambda config: layers)
    monkeypatch.setattr(
        first_runner, "clear", lambda vllm, of, pages: cleared.append([page.tolist() for page in pages])
    )
    runner.vllm_config = None
    groups = [NAMES[:1], ["attention"], NAMES[1:]]
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups])
    # Decodes; a tail with placeholders; one of two tokens; a prompt of one token with placeholders; one that more will follow.
    runner.batch({"a": 3, "b": 3, "d": 3}, a=(5, 1, 5), b=(9, 0, 8), c=(9, 0, 7), d=(1, 0, 0), e=(9, 0, 5))
    tables = [torch.arange(10).view(5, 2) + 100 * group for group in range(3)]
    blocks = [SimpleNamespace(get_device_tensor=lambda count, t=t: t[:count]) for t in tables]
    runner.input_batch.block_table = blocks
    monkeypatch.setattr(first_runner, "announce", lambda *_: None)
    step(runner, {"a": 4, "b": 4, "c": 2, "d": 4, "e": 1})
    assert shared.step.drafted.batch.tolist() == [0, 1, 3]
    assert shared.step.drafted.sizes.tolist() == [4, 4, 4]
    assert cleared == [[[6], [206], [206]]]
    assert len(layers) == LAYERS
    runner.batch({"a": 3}, a=(5, 2, 6))
    step(runner, {"a": 4})
    assert len(cleared) == 1
    # The name of one that has just ended: nothing of that is kept.
    finish(runner, 4)
    assert shared.memory.lengths.sum() == 4
    runner.batch({}, a=(1, 0, 0))
    runner.input_batch.block_table = blocks
    step(runner, {"a": 1})
    assert shared.memory.lengths.sum() == 0
    assert shared.step.num_accepted.tolist() == [1]
