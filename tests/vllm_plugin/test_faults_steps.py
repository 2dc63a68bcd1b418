"""Reported faults of steps: what is kept, of whom, and what padding, dummies and neighbours do to it."""

import numpy as np
import pytest
import torch

from tolerances import KERNEL_EXACT
from treewy.ops import gdn
from treewy.vllm_plugin import step as module
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.step import Step, dummies
from vllm_plugin.rows import LAYERS, VALUE_HEADS, sizes
from vllm_plugin.scripted import WIDE, Scripted, distance, drafted, plain

RECONSTRUCT, RING = 4, 16
POLICIES = pytest.mark.parametrize("kept_rows", [RECONSTRUCT, RING])


def assert_as_plain(engine: Scripted, requests: dict[int, int]) -> None:
    """Check outputs of all tokens, and states, against decoding alone and without drafts."""
    for request, slot in requests.items():
        outputs = engine.outputs_of[request]
        alone = plain(request, slot, len(outputs))
        assert distance(torch.stack(outputs), torch.stack(alone.outputs_of[request])) < KERNEL_EXACT
        assert distance(engine.state(request, slot), alone.state(request, slot)) < KERNEL_EXACT


@POLICIES
def test_three_right_then_none_drafted_then_two(kept_rows: int) -> None:
    """Fault A01: a step without drafts finds what the one before accepted, all of it, and so does the one after."""
    engine = Scripted(kept_rows)
    for rows, sampled in ((4, 4), (1, 1), (3, 2), (1, 1), (4, 1)):
        engine.verify([2], [7], [rows], [sampled])
        assert_as_plain(engine, {2: 7})


@POLICIES
def test_nothing_sampled_beside_three(kept_rows: int) -> None:
    """Fault A02: who sampled nothing has one more token of its prompt, and neither none nor those behind it."""
    engine = Scripted(kept_rows)
    engine.verify([5, 1], [2, 8], [4, 4], [0, 3])
    assert engine.memory.lengths[[5, 1]].tolist() == [1, 3]
    assert engine.step.accepted[[5, 1]].tolist() == [1, 3]
    engine.verify([1, 5], [8, 2], [1, 4], [0, 2])
    assert_as_plain(engine, {5: 2, 1: 8})


@POLICIES
def test_random_rejects_do_not_add_up(kept_rows: int) -> None:
    """Faults A06 and A12: after 64 steps, most drafts rejected, all that is remembered is what it is without drafts."""
    engine, random = Scripted(kept_rows), np.random.default_rng(3)
    for _ in range(64):
        rows = int(random.integers(2, 5))
        engine.verify([0], [3], [rows], [1 if random.random() < 0.8 else int(random.integers(1, rows + 1))])
    assert_as_plain(engine, {0: 3})


@pytest.mark.parametrize(("kept_rows", "padding"), [(RECONSTRUCT, 3), (RING, 0)])
def test_requests_among_others(kept_rows: int, padding: int) -> None:
    """Faults A10, C04 and D08: five, with room for eight, each as alone; which histories fold does not depend on others."""
    pages = {4: 2, 0: 7, 6: 1, 2: 5, 1: 8}
    together, alone = Scripted(kept_rows), {request: Scripted(kept_rows) for request in pages}
    random = np.random.default_rng(5)
    for number in range(8):
        # Who runs, how much it drafts and how much of that is right changes all the time.
        running = [request for request in random.permutation([*pages]).tolist() if number % 4 or request != 6]
        rows = random.integers(1, 5, size=len(running)).tolist()
        accepted = [int(random.integers(1, size + 1)) for size in rows]
        together.verify(running, [pages[request] for request in running], rows, accepted, padding=padding)
        for request, size, count in zip(running, rows, accepted, strict=True):
            alone[request].verify([request], [pages[request]], [size], [count])
            assert together.memory.lengths[request] == alone[request].memory.lengths[request]
    for request, slot in pages.items():
        both = (torch.stack(engine.outputs_of[request]) for engine in (together, alone[request]))
        assert distance(*both) < KERNEL_EXACT
        assert distance(together.states[:, slot], alone[request].states[:, slot]) < KERNEL_EXACT


def test_dummies_over_pages_of_requests() -> None:
    """Fault C05: a dummy step whose table still has the pages of a step before changes none of them, nor what is kept."""
    engine = Scripted(RECONSTRUCT)
    engine.verify([0, 1, 2], [2, 7, 5], [4, 4, 4], [3, 1, 4])
    engine.step.forget(2)
    states, kept = engine.states.clone(), [part.clone() for part in engine.memory.kept]
    engine.step.begin(dummies(np.full(4, 4, np.int32), 4), 4, 16)
    tables = engine.step.tables
    assert tables is not None
    engine.forward(tables, [2, 7, 5, 8], torch.randn(LAYERS, 16, VALUE_HEADS, WIDE))
    engine.step.finish(torch.full((4,), 4))
    assert torch.equal(engine.states, states)
    assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(engine.memory.kept, kept, strict=True))
    assert engine.step.keeps.tolist() == [True, True, *[False] * 6]
    engine.verify([1, 0], [7, 2], [4, 4], [2, 2])
    assert_as_plain(engine, {0: 2, 1: 7})


@pytest.mark.parametrize(("null", "padding"), [(0, 1), (-1, 3)])
def test_padding_touches_nobody(null: int, padding: int) -> None:
    """Faults C01, C03, C07 and C10: its page is the null block or none, its request is nobody, and its output is zero.

    Request 0, whose index padding might have, keeps rows and does not run.
    """
    engine = Scripted(RECONSTRUCT)
    engine.verify([0, 3], [2, 7], [4, 4], [3, 2])
    others = [slot for slot in range(9) if slot != 7]
    before, kept = engine.states[:, others].clone(), [part[:, 0].clone() for part in engine.memory.kept[:4]]
    outputs = engine.verify([3], [7], [4], [2], padding=padding, null=null)
    assert all(out[:4].isfinite().all() and not out[4:].any() for out in outputs)
    assert torch.equal(engine.states[:, others].nan_to_num(), before.nan_to_num())
    assert engine.memory.lengths.tolist() == [3, 0, 0, 2, 0, 0, 0, 0]
    own = ((part[:, 0], then) for part, then in zip(engine.memory.kept[:4], kept, strict=True))
    assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in own)


def test_a_graph_is_replayed_for_fewer_and_more() -> None:
    """Faults C07, C08, C09 and L12: captured for four requests it serves four, two, four and one, as eager steps do.

    A graph reads the memory that it was captured with: here the tables of the capture are used for every step.
    """
    graph, eager = (Scripted(RECONSTRUCT) for _ in range(2))
    graph.step.begin(dummies(np.full(4, 4, np.int32), 4), 4, 16)
    captured = graph.step.tables
    assert captured is not None
    graph.capture(4, 16, captured)
    pages = {0: 2, 5: 7, 3: 1, 6: 4}
    for running, rows, sampled in (
        ([0, 5, 3, 6], [4, 4, 4, 4], [4, 1, 3, 2]),
        ([3, 0], [4, 4], [2, 2]),
        ([6, 3, 5, 0], [4, 1, 4, 2], [1, 1, 4, 2]),
        ([5], [4], [3]),
        ([0, 5, 3, 6], [4, 4, 4, 4], [1, 1, 1, 1]),
    ):
        for engine in (graph, eager):
            engine.verify(running, [pages[request] for request in running], rows, sampled)
        assert captured.places.tolist() == [*running, *[-1] * (4 - len(running))]
        ends = np.cumsum(rows).tolist()
        assert captured.tree.cu_rows.tolist() == [0, *ends, *[ends[-1]] * (4 - len(running))]
        assert (len(captured.fold), captured.tree.num_rows) == (4, 16)
    for request, slot in pages.items():
        both = (torch.stack(engine.outputs_of[request]) for engine in (graph, eager))
        assert distance(*both) < KERNEL_EXACT
        assert distance(graph.state(request, slot), eager.state(request, slot)) < KERNEL_EXACT


@pytest.mark.parametrize("wide", [np.int32, np.int64])
def test_indices_of_either_width(wide: type) -> None:
    """Fault C13: what kernels read has 32 bits, whatever the engine counts in."""
    step = Step(Memory(sizes(RECONSTRUCT), "cpu"), "eager")
    step.begin(drafted([6, 2], [4, 3], wide), 2, 7)
    tables = step.tables
    assert tables is not None
    assert tables.places.tolist() == [6, 2]
    tree = tables.tree
    parts = (tables.places, tables.fold, tree.parents, tree.cu_rows, tree.seq_of_row, tree.depth)
    assert {part.dtype for part in parts} == {torch.int32}
    seen = []
    append = module.gdn.append_layers

    def appended(kept: object, places: torch.Tensor, rows: object, path: object, **options: object) -> None:
        seen.append((places.dtype, path.rows.dtype, path.lengths.dtype))  # pyright: ignore[reportAttributeAccessIssue]
        append(kept, places, rows, path, **options)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.gdn, "append_layers", appended)
        step.finish(torch.from_numpy(np.array([2, 3], wide)))
    assert seen == [(torch.int32,) * 3]
    assert step.memory.lengths[[6, 2]].tolist() == [2, 3]


@POLICIES
def test_counts_follow_their_requests(kept_rows: int) -> None:
    """Fault D03: of three that accepted 4, 1 and 3 the middle one ends, and the last takes its place in the batch."""
    engine = Scripted(kept_rows)
    engine.verify([0, 1, 2], [2, 7, 5], [4, 4, 4], [4, 1, 3])
    engine.step.forget(1)
    assert engine.memory.lengths[:3].tolist() == [4, 0, 3]
    assert engine.step.accepted[:3].tolist() == [4, 1, 3]
    engine.verify([2, 0], [5, 2], [4, 4], [2, 1])
    assert engine.step.accepted[:3].tolist() == [1, 1, 2]
    assert_as_plain(engine, {0: 2, 2: 5})


@pytest.mark.parametrize("count", [1, 2, 4])
@POLICIES
def test_placeholders_of_a_prompts_last_token(kept_rows: int, count: int) -> None:
    """Faults D05 and D06: of rows that pad it nothing stays, whoever runs beside it and whatever the placeholders are."""
    pages = {0: 2, 1: 7, 2: 5, 3: 8}
    engines = [Scripted(kept_rows, wrong=seed) for seed in (1, 2)]
    for engine in engines:
        engine.verify([0, 1], [2, 7], [4, 4], [2, 4])
        running = [0, 3, 1, 2][:count]
        engine.verify(
            running,
            [pages[request] for request in running],
            [4] * count,
            [0 if request > 1 else 2 for request in running],
        )
        assert_as_plain(engine, {request: pages[request] for request in running})
    for request in running:
        both = (engine.state(request, pages[request]) for engine in engines)
        assert distance(*both) < KERNEL_EXACT


@pytest.mark.parametrize("count", [1, 4, 8])
def test_one_pass_for_a_whole_batch(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault D10: what is accepted moves in one call, for all requests and layers; each layer verifies in one."""
    calls = dict.fromkeys(("choose_folds", "commit_verify", "append_layers", "settle"), 0)

    def counted(name: str) -> object:
        function = getattr(gdn, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    engine = Scripted(RECONSTRUCT)
    for name in calls:
        monkeypatch.setattr(gdn, name, counted(name))
    engine.verify(list(range(count)), list(range(1, count + 1)), [4] * count, [2] * count)
    assert calls == {"choose_folds": 1, "commit_verify": LAYERS, "append_layers": 1, "settle": 2}
