"""What a worker counts: what requests gained, histories that folded, steps; without a question to the device."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.vllm_plugin import counts as module
from treewy.vllm_plugin.counts import Counts, Numbers, interval_of, log_line
from treewy.vllm_plugin.layer import _Lasting
from treewy.vllm_plugin.metrics import WorkerExtension, read
from treewy.vllm_plugin.step import dummies
from vllm_plugin.fakes import layers_on
from vllm_plugin.rows import LAYERS, Engine, sizes
from vllm_plugin.test_step import STEPS

PATH = 4
NOTHING = Numbers(0, 0, 0, 0, (0,) * PATH, 0)


def counts() -> Counts:
    return Counts(sizes(16), torch.device("cpu"))


def observe(
    counted: Counts, rows: list[int], gained: list[int], fold: list[int], *, full_graph: bool = False, device="cpu"
) -> None:
    options = {"dtype": torch.int32, "device": device}
    on_device = torch.tensor(gained, **options), torch.tensor(fold, **options)
    counted.observe(np.array(rows, np.int32), *on_device, full_graph=full_graph)


def folds_of(gains: list[int], capacity: int) -> int:
    """Return how often a request folds whose steps gained so much: before each that might not fit beside what it has."""
    folds = held = 0
    for gained in gains:
        if held + PATH > capacity:
            folds, held = folds + 1, 0
        held += max(1, gained)
    return folds


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    caplog.set_level(logging.INFO, "vllm.treewy")
    return made


@pytest.mark.parametrize("kept_rows", [4, 5, 8, 16])
def test_counts_are_those_of_the_steps(kept_rows: int) -> None:
    engine = Engine(kept_rows)
    for step in STEPS * 2:
        engine.run(*step, padding=2)
    rows = [(size, gained) for _, _, given, sampled in STEPS * 2 for size, gained in zip(given, sampled, strict=True)]
    drafted = [gained for size, gained in rows if size > 1 and gained]
    of_request = {
        request: [
            got for chosen, _, _, sampled in STEPS * 2 for at, got in zip(chosen, sampled, strict=True) if at == request
        ]
        for request in range(5)
    }
    numbers = engine.step.counts.read()
    assert numbers == Numbers(
        num_steps=2 * len(STEPS),
        num_full_graph_steps=0,
        num_draft_tokens=sum(size - 1 for size, _ in rows),
        num_undrafted=len(rows) - len(drafted),
        accept_lengths=tuple(drafted.count(length) for length in range(1, PATH + 1)),
        num_folds=sum(folds_of(gains, kept_rows) for gains in of_request.values()),
    )
    assert numbers.num_undrafted == 4
    assert numbers.num_drafts == len(drafted)
    assert numbers.num_accepted_tokens == sum(drafted) - len(drafted)
    assert numbers.accepted_at_least == tuple(sum(gained > depth for gained in drafted) for depth in range(1, PATH))


def test_trees_have_more_rows_than_depths() -> None:
    counted = counts()
    observe(counted, [15, 7, 1], [4, 1, 1], [0, 1, 1])
    assert counted.read() == Numbers(1, 0, 14 + 6, 1, (1, 0, 0, 1), 2)


def test_dummies_do_not_count() -> None:
    """Neither do steps of prompts alone, and the graph of a dummy is not the next step's."""
    engine = Engine(16)
    engine.step.begin(dummies(np.array([4, 4]), 4), 2, 8, full_graph=True)
    assert engine.step.counts.read() == NOTHING
    engine.step.begin(dummies(np.array([9, 4]), 4), 0, 0)
    engine.step.finish(torch.tensor([1, 1]))
    assert engine.step.counts.read() == NOTHING
    engine.run([0], [2], [4], [3])
    assert engine.step.counts.read() == Numbers(1, 0, 3, 0, (0, 0, 1, 0), 0)


def test_full_graphs() -> None:
    counted = counts()
    for full_graph in (True, False, True):
        observe(counted, [4], [2], [0], full_graph=full_graph)
    assert counted.read()[:2] == (3, 2)


def test_counting_asks_the_device_nothing() -> None:
    """On a device that has no values, every question is an error."""
    nowhere = torch.device("meta")
    counted = Counts(sizes(16), nowhere)
    counted.interval = 1e9
    for rows in ([4, 4, 4], [4, 1, 2]):
        observe(counted, rows, [1, 2, 3], [0, 1, 0], device="meta")
    with pytest.raises(NotImplementedError, match="meta"):
        counted.read()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_counting_nor_the_log_waits_for_a_gpu(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Where waiting is an error; the last line is of a copy that is done."""
    counted = Counts(sizes(16), torch.device("cuda"))
    gained, fold = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([3, 1], [0, 1]))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for rows in ([4, 4], [4, 1]) * 3:
            clock.now += 10
            counted.observe(np.array(rows, np.int32), gained, fold, full_graph=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    counted.observe(np.array([4, 4], np.int32), gained, fold, full_graph=True)
    assert caplog.messages
    assert counted.read() == Numbers(7, 7, 4 * 6 + 3 * 3, 3, (4, 0, 7, 0), 7)


def test_deep_sleep_leaves_the_counts() -> None:
    engine = Engine(8)
    engine.run([0, 3], [2, 7], [4, 4], [3, 1])
    before = engine.step.counts.read()
    model = _Lasting(engine.step.lasting)
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for value in vars(engine.step.counts).values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])
    assert engine.step.counts.read() == before
    engine.run([0, 3], [2, 7], [4, 4], [3, 1])
    assert engine.step.counts.read().accept_lengths == (2, 0, 2, 0)


def test_a_line_an_interval(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Of what was counted since the last one."""
    counted = counts()
    for at, gained in ((0, 1), (9.9, 2), (10, 4), (11, 1), (19.9, 3), (55, 3), (56, 1)):
        clock.now = 1000 + at
        observe(counted, [4, 4], [gained, 1], [1, 0], full_graph=gained == 3)
    assert caplog.messages == [
        "treewy: 3 steps, 0 of them as full graphs; 6 drafts gained 1.67 tokens each, accepted by depth 0.33 0.17 0.17; "
        "3 histories folded",
        "treewy: 3 steps, 2 of them as full graphs; 6 drafts gained 1.67 tokens each, accepted by depth 0.33 0.33 0.00; "
        "3 histories folded",
    ]


def test_workers_that_count_the_same_do_not_say_it(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    counted = counts()
    counted.logs = False
    for _ in range(3):
        clock.now += 60
        observe(counted, [4], [2], [0])
    assert not caplog.messages
    assert counted.read().num_steps == 3


def test_the_log_waits_for_no_copy(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is under way at a time, and what it says is of the moment when it began."""
    counted, done, begun = counts(), [False], []
    begin = counted._begin_copy

    def begin_copy() -> Any:
        begun.append(clock.now)
        return begin()._replace(done=SimpleNamespace(query=lambda: done[0]))

    monkeypatch.setattr(counted, "_begin_copy", begin_copy)
    for now in (0.0, 10.0, 15.0, 30.0):
        clock.now = now
        observe(counted, [4], [2], [0])
    assert (begun, caplog.messages) == ([10.0], [])
    done[0], clock.now = True, 31.0
    observe(counted, [4], [2], [0])
    assert [line.split(",")[0] for line in caplog.messages] == ["treewy: 2 steps"]
    clock.now = 32.0
    observe(counted, [4], [2], [0])
    assert begun == [10.0, 32.0]
    assert [line.split(",")[0] for line in caplog.messages] == ["treewy: 2 steps", "treewy: 4 steps"]


def test_the_interval_is_vllms() -> None:
    assert [interval_of(given) for given in (None, "2.5", "0", "-3")] == [10.0, 2.5, 10.0, 10.0]


def test_a_line_without_drafts() -> None:
    numbers = NOTHING._replace(num_steps=1200, num_undrafted=1200)
    assert log_line(numbers) == (
        "treewy: 1,200 steps, 0 of them as full graphs; nothing was drafted; 0 histories folded"
    )


def worker(engine: Engine) -> Any:
    """Return a worker whose layers have pages in two pieces of memory: the last two layers share one."""
    layers = layers_on(engine, engine.normal(LAYERS, 9, 2, 6))
    of_layer = [torch.zeros(1000) for _ in range(2)]
    for layer in layers:
        memory = of_layer[min(layer.treewy_number, 1)]
        layer.kv_cache = [memory[:108].view(9, 2, 6), memory[108:972].view(9, 4, 4, 6)]
    context = {str(number): layer for number, layer in enumerate(layers)}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    )


@pytest.mark.parametrize("ask", [read, WorkerExtension.treewy_metrics])
def test_what_is_read_from_outside(ask: Any) -> None:
    engine = Engine(16)
    engine.run([0, 3], [2, 7], [4, 2], [3, 1])
    row_bytes = engine.memory.sizes.row_bytes
    assert ask(worker(engine)) == {
        "num_steps": 1,
        "num_full_graph_steps": 0,
        "num_drafts": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 2,
        "num_undrafted": 0,
        "accept_lengths": [1, 0, 1, 0],
        "num_folds": 0,
        "state_bytes": LAYERS * 4 * (12 + 96),
        "rows_bytes": LAYERS * row_bytes * (8 * 16 + 35) + 4 * 8,
        "pages_bytes": 2 * 4000,
    }


def test_where_the_plugin_is_not_at_work() -> None:
    context = {"attention": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert read(SimpleNamespace(vllm_config=config)) == {}
