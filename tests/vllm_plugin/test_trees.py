"""Where a step's trees lie in vLLM's batch: positions, what attention is told, and what the drafter finds afterwards."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.packed import PathTables
from treewy.tree import DraftTree
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.state import model_state_class
from treewy.vllm_plugin.step import Drafted, Step
from treewy.vllm_plugin.trees import Trees
from vllm_plugin import fakes
from vllm_plugin.rows import padded, sizes

TREE = DraftTree((-1, 0, 0, 2, 2, 4))
REQUESTS = 8


class Running:
    """A step's trees in a batch.

    Args:
        rows: Rows of each request of the batch.
        prompts: Places of the batch that draft nothing.
        padding: Requests and rows more, of a captured graph.
        trees: Of an earlier step.
    """

    def __init__(
        self, rows: list[int], prompts: tuple[int, ...] = (), *, padding: int = 0, trees: Trees | None = None
    ) -> None:
        self.rows, self.starts = rows, np.concatenate([[0], np.cumsum(rows)])
        self.at = [place for place in range(len(rows)) if place not in prompts]
        chosen = np.array(self.at, np.int32)
        self.drafted = Drafted(chosen, chosen + 1, np.array(rows, np.int32)[chosen])
        self.before = [20 + 3 * place for place in range(len(rows))]  # tokens of each request
        ends = [known + count for known, count in zip(self.before, rows, strict=True)]
        self.batch = SimpleNamespace(
            num_reqs=len(rows),
            seq_lens=torch.tensor([*ends, *[0] * padding], dtype=torch.int32),
            query_start_loc_np=np.append(self.starts, [self.starts[-1]] * padding).astype(np.int32),
        )
        memory = Memory(sizes(4, step_rows=TREE.num_rows, max_path=TREE.max_depth + 1), "cpu")
        self.step = Step(memory, "eager", TREE)
        self.step.begin(self.drafted, len(chosen) + padding, self.drafted.num_rows + padding)
        self.trees = Trees(TREE, REQUESTS, "cpu") if trees is None else trees
        assert self.step.tables is not None
        self.trees.begin(self.drafted, self.step.tables, self.batch)

    def per_row(self, value: Any) -> torch.Tensor:
        """Return a value of each row of the batch, and of two of padding."""
        rows = [value(place, row) for place, count in enumerate(self.rows) for row in range(count)]
        return torch.tensor([*rows, -5, -6])


# Whole trees, cut ones, and prompts between, before and behind.
BATCHES = [
    ([6, 6, 6], ()),
    ([6, 3, 1], ()),
    ([6, 5, 6], (1,)),
    ([9, 6, 1, 4], (0,)),
    ([6, 2, 11], (2,)),
    ([7], (0,)),
]


@pytest.mark.parametrize(("rows", "prompts"), BATCHES)
@pytest.mark.parametrize("parts", [(), (3,)])
def test_positions_are_by_depth(rows: list[int], prompts: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """Faults G01, I14 and L04: a row lies by its number and stands by its depth, in all parts of its position.

    Prompts and padding stay where they are, and so does everything when it is taken back.
    """
    running = Running(rows, prompts)
    lie = running.per_row(lambda place, row: running.before[place] + row)
    stand = running.per_row(
        lambda place, row: running.before[place] + (row if place in prompts else int(TREE.depth[row]))
    )
    positions = lie.expand(*parts, -1).clone() + torch.arange(3)[:, None] if parts else lie.clone()
    before = positions.clone()
    running.trees.shift_positions(positions)
    assert torch.equal(positions, stand.expand(*parts, -1) + torch.arange(3)[:, None] if parts else stand)
    running.trees.unshift_positions(positions)
    assert torch.equal(positions, before)


@pytest.mark.parametrize(("rows", "prompts"), BATCHES[:-1])
def test_what_attention_is_told(rows: list[int], prompts: tuple[int, ...]) -> None:
    """Faults E09 and I14: of each tree the places before its root, its pages and its rows, whether or not it was cut."""
    running = Running(rows, prompts)
    tables = torch.arange(100, 100 + 2 * len(rows)).view(-1, 2)
    told = running.trees.attended(tables, ["a", "b"])
    assert told is not None
    assert running.step.tables is not None
    assert told.tree is running.step.tables.tree
    assert told.lengths.tolist() == [running.before[place] for place in running.at]
    assert torch.equal(told.table, tables[running.at])
    own = [start + row for place in running.at for start in [running.starts[place]] for row in range(rows[place])]
    assert (list(range(len(own))) if told.rows is None else told.rows.tolist()) == own
    assert (told.rows is None) == (not prompts)
    assert running.trees.of_layer == {"a": told, "b": told}


def test_padding_is_empty_and_buffers_stay() -> None:
    """Fault C07: a captured graph reads the same lengths in every step; a sequence without a request has none."""
    running = Running([6, 6], padding=2)
    tables = torch.arange(8).view(4, 2)
    told = running.trees.attended(tables)
    assert told is not None
    assert told.lengths.tolist() == [20, 23, 0, 0]
    assert torch.equal(told.table, tables)
    other = Running([6], padding=3, trees=running.trees)
    again = other.trees.attended(tables)
    assert again is not None
    assert again.lengths.tolist() == [20, 0, 0, 0]
    assert again.lengths.data_ptr() == told.lengths.data_ptr()


def test_nothing_is_known_of_the_step_before() -> None:
    running = Running([6, 6])
    running.trees.attended(torch.zeros(2, 2, dtype=torch.int64), ["a"])
    running.trees.path = padded([[0, 2], [0]], 4)
    running.trees.finish(running.step.finish(torch.tensor([2, 1]), running.trees.path))
    assert running.trees.accepted is not None
    prompts = Running([6, 6], (0, 1), trees=running.trees)
    assert (prompts.trees.accepted, prompts.trees.path, prompts.trees.of_layer) == (None, None, {})
    assert prompts.trees.attended(torch.zeros(2, 2, dtype=torch.int64)) is None
    prompts.trees.finish(None)
    assert prompts.trees.accepted is None
    assert Trees(TREE, REQUESTS, "cpu").attended(torch.zeros(2, 2, dtype=torch.int64)) is None


@pytest.mark.parametrize(
    ("rows", "prompts", "paths"),
    [
        ([6, 6, 6], (), [[0, 2, 4, 5], [0], [0, 1]]),
        ([6, 3, 1], (), [[0, 2, 3], [0, 2], [0]]),
        ([6, 5, 6], (1,), [[0, 2, 4], [0], [0, 2, 4, 5]]),
        ([9, 6, 1, 4], (0,), [[0], [0, 2, 3], [0], [0, 1]]),
    ],
)
def test_the_drafter_finds_a_chain(rows: list[int], prompts: tuple[int, ...], paths: list[list[int]]) -> None:
    """Faults G05 and G07: rows of each path come first among its request's, and no other row of the batch moves."""
    running = Running(rows, prompts)
    running.trees.path = padded(paths, TREE.max_depth + 1)
    counts = torch.tensor([len(path) for path in paths])
    running.trees.finish(running.step.finish(counts, running.trees.path))
    accepted = running.trees.accepted
    assert accepted is not None
    assert accepted.starts.tolist() == [running.starts[place] for place in running.at]
    assert accepted.lengths.tolist() == [len(paths[place]) for place in running.at]
    tokens = running.per_row(lambda place, row: 100 * place + row)
    want = tokens.clone()
    for place in running.at:
        path, start = paths[place], running.starts[place]
        want[start : start + len(path)] = tokens[[start + row for row in path]]
    hidden = tokens[:, None].float() + torch.tensor([0.25, 0.5])
    running.trees.gather_paths(tokens, hidden)
    assert torch.equal(tokens, want)
    assert torch.equal(hidden, want[:, None] + torch.tensor([0.25, 0.5]))


def test_prompts_alone_move_nothing() -> None:
    running = Running([6, 6], (0, 1))
    tokens = torch.arange(14)
    running.trees.gather_paths(tokens)
    assert torch.equal(tokens, torch.arange(14))


class Base(fakes.ModelState):
    """vLLM's model state, with its inputs; multimodal models have positions of their own among them."""

    separate = False

    def __init__(self, vllm_config: Any, align: bool = False) -> None:
        super().__init__(vllm_config, align)
        self.vllm_config = vllm_config

    def prepare_inputs(self, batch: Any, req_states: Any) -> dict[str, Any]:
        """Return what the model takes beside the batch."""
        return {"positions": batch.positions.expand(3, -1).clone()} if self.separate else {}

    def custom_sampler(self, sampler: Any) -> Any:
        """Leave it to the runner."""
        return sampler, None


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("real", [False, True])
def test_only_requests_have_their_positions_set(real: bool, separate: bool) -> None:
    """Faults G01 and L04: dummies have no positions of their own; a model's three parts are set beside the batch's."""
    running = Running([6, 3])
    shared = SimpleNamespace(step=running.step, trees=running.trees)
    layer = SimpleNamespace(treewy=shared, prefix="a")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": layer}))
    names = fakes.compat()
    vars(names)["MambaHybridModelState"] = Base
    state = model_state_class(names)(config)
    state.separate, state._is_real = separate, real
    lie = running.per_row(lambda place, row: running.before[place] + row)
    running.batch.positions = lie.clone()
    inputs = state.prepare_inputs(running.batch, None)
    stand = running.per_row(lambda place, row: running.before[place] + int(TREE.depth[row])) if real else lie
    assert torch.equal(running.batch.positions, stand)
    if separate:
        assert torch.equal(inputs["positions"], stand.expand(3, -1))
    shared.trees = None
    assert state.custom_sampler("vLLM's") == ("vLLM's", None)


def test_whoever_gets_an_index_says_what_it_may_accept() -> None:
    """Fault H17: with penalties the root alone; the next request of the index begins again."""
    running = Running([6])
    shared = SimpleNamespace(step=running.step, trees=running.trees, forget=running.step.forget)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace(treewy=shared, prefix="a")})
    )
    names = fakes.compat()
    vars(names)["MambaHybridModelState"] = Base
    state = model_state_class(names)(config)
    alone = torch.zeros(8, dtype=torch.bool)
    state._sampler = SimpleNamespace(alone=alone)
    for penalty in (0.5, 0.0):
        sampling = SimpleNamespace(
            presence_penalty=penalty,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            bad_words=None,
            structured_outputs=None,
        )
        state.add_request(3, SimpleNamespace(req_id=f"{penalty}", sampling_params=sampling))
        assert alone.tolist() == [False] * 3 + [penalty > 0] + [False] * 4


def test_paths_are_local_to_each_tree() -> None:
    running = Running([6, 4], padding=1)
    running.trees.finish(PathTables(torch.tensor([[0, 2, 4], [6, 8, 6]]), torch.tensor([3, 2])))
    assert running.trees.accepted is not None
    assert running.trees.accepted.local[:, :2].tolist() == [[0, 2], [0, 2]]
