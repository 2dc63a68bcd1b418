"""Trees grown level by level, against trees grown path by path from a queue of everything."""

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from growth_oracle import LogitsOf, best_first, filled, log_law
from treewy.draft import Budget, Draft, Draws, Root
from treewy.draft.growth import Growth, grow
from treewy.sampling import DRAFT, Law, Stream, draw_without_replacement
from treewy.tree import DraftTree

VOCAB = 6


def logits_by(seed: int, spread: float = 2.0) -> LogitsOf:
    """Return a drafter's whole mind: logits that depend on the path and on nothing else."""

    def logits_of(path: Sequence[int]) -> np.ndarray:
        return np.random.default_rng([seed, zlib.crc32(bytes(path))]).normal(size=VOCAB) * spread

    return logits_of


class Runner:
    """Runs growths on given logits, one source per sequence, and keeps what it ran."""

    def __init__(self, sources: Sequence[LogitsOf]) -> None:
        self.sources = sources
        self.ran: list[list[list[tuple[int, ...]]]] = []

    def __call__(self, growing: list[tuple[int, Growth]]) -> torch.Tensor:
        self.ran.append([[] for _ in self.sources])
        rows = []
        for seq, growth in growing:
            tree = growth.tree
            for row in range(tree.num_rows - growth.num_new, tree.num_rows):
                path = tuple(tree.tokens[node] for node in tree.path(row))
                self.ran[-1][seq].append(path)
                rows.append(self.sources[seq](path))
        return torch.from_numpy(np.stack(rows))


def grown(roots: Sequence[Root], sources: Sequence[LogitsOf]) -> list[Draft]:
    return grow(roots, Runner(sources))


budgets = st.builds(Budget, st.integers(1, 30), st.integers(0, 5), st.integers(1, VOCAB))
laws = st.none() | st.builds(Law, temperature=st.sampled_from([0.3, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 3]))


@given(budget=budgets, law=laws, seed=st.integers(0, 10_000), spread=st.sampled_from([0.3, 2.0, 6.0]))
def test_a_budget_is_spent_best_first(budget: Budget, law: Law | None, seed: int, spread: float) -> None:
    """Rows, places and siblings' order are the queue's; no limit is passed, nothing is drawn, no law is claimed."""
    source = logits_by(seed, spread)
    stream = Stream(1, DRAFT)
    root = Root(0, 5, budget, law and Draws(law, stream))
    [draft] = grown([root], [source])
    assert draft.tree == best_first(source, 5, budget, law)
    assert draft.laws == {}
    assert stream.uniform(3).tolist() == Stream(1, DRAFT).uniform(3).tolist()
    assert draft.tree.num_rows <= budget.num_rows
    assert draft.tree.max_depth <= budget.max_depth
    assert max(len(draft.tree.children(row)) for row in range(draft.tree.num_rows)) <= budget.max_children
    assert draft.tree.depth.tolist() == sorted(draft.tree.depth.tolist())
    siblings = [[draft.tree.tokens[child] for child in draft.tree.children(row)] for row in range(draft.tree.num_rows)]
    assert all(len(set(tokens)) == len(tokens) for tokens in siblings)


@given(data=st.data())
def test_mixed_batches_grow_as_each_would_alone(data: st.DataObject) -> None:
    """Fixed shapes beside budgets, deep ones beside roots alone, in any order."""
    shapes = data.draw(st.lists(budgets | st.sampled_from(FIXED), min_size=1, max_size=5))
    sources = [logits_by(seed) for seed in range(len(shapes))]
    roots = [Root(seq, seq, shape) for seq, shape in enumerate(shapes)]
    for root, source, draft in zip(roots, sources, grown(roots, sources), strict=True):
        oracle = filled if isinstance(root.shape, DraftTree) else best_first
        assert draft.tree == oracle(source, root.token, root.shape)
        assert draft.laws == {}


FIXED = [
    DraftTree([-1]),
    DraftTree.chain(3),
    DraftTree.from_widths([3, 2, 2]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
    DraftTree([-1, 0, 1, 2, 0, 4, 4]),  # depth first: filled all the same
]


def test_only_rows_that_may_stay_are_run() -> None:
    """A level asks for what the budget could still hold: neither the last level's rows nor those that have fallen out."""
    budget, source = Budget(8, 4, 3), logits_by(3)
    runner = Runner([source])
    grow([Root(0, 1, budget)], runner)
    paths = [path for level in runner.ran for path in level[0]]
    assert len(runner.ran) == budget.max_depth
    assert [len(path) - 1 for path in paths] == sorted(len(path) - 1 for path in paths)
    assert max(map(len, paths)) == budget.max_depth
    assert all(len(level[0]) < budget.num_rows for level in runner.ran)
    # Of all paths that were ever offered, each that ran was among the best so far.
    offered: list[tuple[float, tuple[int, ...]]] = [(0.0, (1,))]
    for level in runner.ran:
        best = {path for _, path in sorted(offered)[: budget.num_rows]}
        assert set(level[0]) == {path for path in best if len(path) == len(level[0][0])}
        for path in level[0]:
            chances = log_law(source(path), None)
            loss = next(loss for loss, known in offered if known == path)
            offered += [(loss - chances[t], (*path, t)) for t in np.argsort(-chances)[: budget.max_children].tolist()]


def test_fixed_shapes_run_rows_with_children_only() -> None:
    runner = Runner([logits_by(3), logits_by(4)])
    grow([Root(0, 1, FIXED[3]), Root(1, 2, FIXED[0])], runner)
    assert [[len(rows) for rows in level] for level in runner.ran] == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("budget", "parents"),
    [
        (Budget(6, 3, 2), [-1, 0, 0, 1, 1, 2]),
        (Budget(4, 3, 6), [-1, 0, 0, 0]),
        (Budget(10, 3, 2), [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4]),
        (Budget(1), [-1]),
        (Budget(9, 0), [-1]),
        (Budget(9, 3, 1), [-1, 0, 1, 2]),
    ],
)
def test_rows_equally_promising_stay_in_order(budget: Budget, parents: list[int]) -> None:
    """Upper levels first, then older parents; a token is no likelier for standing at another place."""
    source = lambda path: np.zeros(VOCAB)  # noqa: E731
    [first], [again] = (grown([Root(0, 1, budget)], [source]) for _ in range(2))
    assert list(first.tree.parents) == parents
    assert first.tree == again.tree


def test_what_is_not_a_number_stays_on_its_branch() -> None:
    """A row whose logits say nothing gets no children; the rest of the tree is as if it were a dead end."""
    clean = logits_by(11)
    best = best_first(clean, 0, Budget(12, 4, 3))
    poisoned = best.tokens[1]

    def source(path: Sequence[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan) if tuple(path) == (0, poisoned) else clean(path)

    def dead_end(path: Sequence[int]) -> np.ndarray:
        logits = clean(path)
        return logits if tuple(path[:2]) != (0, poisoned) else np.full(VOCAB, -np.inf)

    with np.errstate(invalid="ignore"):
        want = best_first(dead_end, 0, Budget(12, 4, 3))
    for law in (None, Law(temperature=1.0)):
        [draft] = grown([Root(0, 0, Budget(12, 4, 3), law and Draws(law, Stream(0, DRAFT)))], [source])
        assert draft.tree == want
    assert not want.children(1)
    assert grown([Root(0, 0, Budget(12, 4, 3))], [lambda path: np.full(VOCAB, np.nan)])[0].tree == DraftTree([-1], [0])


def test_drawn_children_come_with_the_law_they_were_drawn_from() -> None:
    """Fault H03: fixed shapes at a temperature: laws of exactly the rows with children, numbers of the sequence's own stream."""
    law, shape = Law(temperature=0.7, top_k=4), FIXED[4]
    sources = [logits_by(7), logits_by(8)]
    alone = grown([Root(0, 2, shape, Draws(law, Stream(5, DRAFT)))], sources[:1])[0]
    other = Root(1, 3, FIXED[2], Draws(Law(), Stream(6, DRAFT)))
    _, beside = grown([other, Root(0, 2, shape, Draws(law, Stream(5, DRAFT)))], sources[::-1])
    assert alone.tree == beside.tree
    assert set(alone.laws) == {row for row in range(shape.num_rows) if shape.children(row)}
    stream = Stream(5, DRAFT)
    for depth in range(shape.max_depth):
        rows = [row for row in alone.laws if shape.depth[row] == depth]
        logits = np.stack([sources[0]([alone.tree.tokens[node] for node in shape.path(row)]) for row in rows])
        laws = law.probabilities(torch.from_numpy(logits))
        width = max(len(shape.children(row)) for row in rows)
        tokens = draw_without_replacement(laws, torch.from_numpy(stream.uniform(len(rows), width)))
        for row, mine, drawn in zip(rows, laws, tokens.tolist(), strict=True):
            torch.testing.assert_close(alone.laws[row], mine)
            children = shape.children(row)
            assert [alone.tree.tokens[child] for child in children] == drawn[: len(children)]
