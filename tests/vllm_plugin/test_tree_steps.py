"""Rows of trees: kept along the accepted path, wherever in the tree it went, and as a chain's where a tree has no branches."""

import numpy as np
import pytest
import torch

from treewy.tree import DraftTree
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.step import Drafted, Step
from vllm_plugin.rows import DIM, HEADS, LAYERS, VALUE_HEADS, Engine, padded, sizes

RING = 16
TREES = {
    "binary": DraftTree.from_widths((2, 2)),
    "wide": DraftTree.from_widths((3, 1, 2)),
    "chain": DraftTree.from_widths((1, 1, 1)),
    "one level": DraftTree.from_widths((4,)),
    # The second child is the one with children.
    "uneven": DraftTree((-1, 0, 0, 2, 2, 4)),
}


def random_step(tree: DraftTree, random: np.random.Generator, num_requests: int) -> tuple[list, list, list]:
    """Return requests of a step, rows of each, some cut short, and a path to any of its rows."""
    requests = random.permutation(8)[: random.integers(1, num_requests + 1)].tolist()
    rows = [tree.num_rows if random.random() < 0.5 else int(random.integers(1, tree.num_rows + 1)) for _ in requests]
    return requests, rows, [tree.path(int(random.integers(size))) for size in rows]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("policy", "padding"), [("reconstruct", 0), ("reconstruct", 2), ("ring", 0), ("ring", 3)])
def test_states_are_those_of_the_walk_along_the_path(name: str, policy: str, padding: int) -> None:
    """Faults A08, G05 and I14: of whole trees and of those that the scheduler cut, over many steps, in every layer."""
    tree, random = TREES[name], np.random.default_rng(7)
    engine = Engine(tree.max_depth + 1 if policy == "reconstruct" else RING, tree=tree)
    for _ in range(12):
        requests, rows, paths = random_step(tree, random, 5)
        slots = [request + 1 for request in requests]
        engine.run(requests, slots, rows, [len(path) for path in paths], padding=padding, paths=paths)
        assert all(output.isfinite().all() for output in engine.outputs)
        assert engine.memory.lengths.max() <= engine.memory.sizes.kept_rows
    assert engine.checker.num_checks > 20 * LAYERS
    assert engine.checker.largest < 1e-6


def test_a_row_sees_its_own_path_and_nothing_else() -> None:
    """Faults G03 and G04: a row's output is that of its path run as a chain, in a tree that is whole and in one that is cut."""
    tree = TREES["uneven"]
    for size in (5, 6):
        for row in range(size):
            path = tree.path(row)
            whole, alone = Engine(4, seed=3, tree=tree), Engine(4, seed=3)
            shapes = ((HEADS, DIM), (HEADS, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS,), (VALUE_HEADS,))
            given = [whole.normal(size, *shape) for shape in shapes]
            for engine, rows in ((whole, list(range(size))), (alone, path)):
                values = iter([part[rows] for part in given] * LAYERS)
                engine.normal = lambda *_, values=values: next(values)
                engine.run([2], [5], [len(rows)], [1])
            assert torch.allclose(whole.outputs[1][row], alone.outputs[1][-1], atol=1e-5)


@pytest.mark.parametrize("kept_rows", [4, RING])
def test_a_tree_without_branches_is_a_chain(kept_rows: int) -> None:
    """Fault A08: rows, states and outputs are a chain's, bit for bit."""
    tree = DraftTree.from_widths((1, 1, 1))
    as_tree, as_chain = Engine(kept_rows, tree=tree), Engine(kept_rows)
    steps = [([0, 3], [4, 4], [3, 1]), ([3, 0], [2, 4], [2, 4]), ([0], [1], [1]), ([0, 3, 5], [4, 3, 4], [4, 1, 2])]
    for requests, rows, sampled in steps:
        slots = [request + 1 for request in requests]
        as_tree.run(requests, slots, rows, sampled, paths=[list(range(count)) for count in sampled])
        as_chain.run(requests, slots, rows, sampled)
    assert all(torch.equal(*pair) for pair in zip(as_tree.outputs, as_chain.outputs, strict=True))
    assert torch.equal(as_tree.states, as_chain.states)
    assert torch.equal(as_tree.memory.lengths, as_chain.memory.lengths)


def test_paths_are_those_of_who_verified() -> None:
    """Fault A09: the engine's batch has a request between that prefills, whose path means nothing."""
    tree = TREES["binary"]
    memory = Memory(sizes(3, step_rows=7, max_path=3), "cpu")
    step = Step(memory, "eager", tree)
    step.begin(Drafted(np.array([0, 2]), np.array([4, 1], np.int32), np.array([7, 5], np.int32)), 2, 12)
    memory.step.u.copy_(torch.arange(memory.step.u.shape[1])[None, :, None, None].expand_as(memory.step.u))
    path = step.finish(torch.tensor([3, 1, 2]), padded([[0, 2, 6], [0, 5, 5], [0, 1]], 3))
    assert path is not None
    assert path.lengths.tolist() == [3, 2]
    assert path.rows[0].tolist() == [0, 2, 6]
    assert path.rows[1, :2].tolist() == [7, 8]
    assert memory.kept.u[0, 4, :3, 0, 0].tolist() == [0, 2, 6]
    assert memory.kept.u[LAYERS - 1, 1, :2, 0, 0].tolist() == [7, 8]


def test_more_of_a_prompt_keeps_the_root_alone() -> None:
    """Fault D06: nothing sampled, whatever the walk says."""
    memory = Memory(sizes(3, step_rows=7, max_path=3), "cpu")
    step = Step(memory, "eager", TREES["binary"])
    step.begin(Drafted(np.arange(1), np.array([4], np.int32), np.array([7], np.int32)), 1, 7)
    path = step.finish(torch.tensor([0]), padded([[0, 2, 6]], 3))
    assert path is not None
    assert path.lengths.tolist() == [1]
    assert memory.lengths.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_tables_of_full_trees_are_written_again_after_cut_ones() -> None:
    """Fault C07: what a cut tree is made of does not stay in the tables of whole ones."""
    tree, size = TREES["wide"], 13
    step = Step(Memory(sizes(4, step_rows=size, max_path=4), "cpu"), "eager", tree)
    for rows in ([size, size], [5, 1], [size, size]):
        step.begin(Drafted(np.arange(2), np.arange(2, dtype=np.int32), np.array(rows, np.int32)), 3, sum(rows) + 2)
        tables = step.tables
        assert tables is not None
        cut = [tree.prefix(count) for count in rows]
        assert tables.tree.cu_rows.tolist() == [0, rows[0], sum(rows), sum(rows)]
        assert tables.tree.parents[: sum(rows)].tolist() == [parent for one in cut for parent in one.parents]
        assert tables.tree.depth[: sum(rows)].tolist() == [depth for one in cut for depth in one.depth.tolist()]
        words = np.concatenate([one.ancestor_words[:, 0] for one in cut])
        assert tables.tree.ancestors[: sum(rows), 0].tolist() == words.tolist()
