"""Trees grown over a multi-token-prediction head, against the head written plainly and each path run as a chain."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from growth_oracle import best_first
from toy_head import HIDDEN, ToyHead
from treewy import packed, tree
from treewy.draft import Budget, Committed, Draft, MTPDrafter, Root, Shape
from treewy.draft.shape import cut_to_depth
from treewy.errors import CapacityError
from treewy.tree import DraftTree

HEAD = ToyHead(seed=1)
SHAPES = [
    DraftTree.chain(3),
    DraftTree.from_widths([3, 3, 3]),
    DraftTree([-1]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
    DraftTree.from_widths([5]),
]


class Script:
    """A sequence's target side: its tokens and random hidden states; what the drafter is shown of it."""

    def __init__(self, seed: int, num_tokens: int = 40) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 64, num_tokens).tolist()
        self.hidden = rng.normal(size=(num_tokens, HIDDEN))

    def rows(self, slot: int, start: int, end: int) -> Committed:
        """Return what a step that commits positions start..end-1 shows: the token after each row."""
        return Committed(
            slot, torch.from_numpy(self.hidden[start:end]), self.tokens[start + 1 : end + 1], self.tokens[start]
        )

    def logits(self, length: int, path: Sequence[int]) -> np.ndarray:
        """Return the head's logits after `length` committed rows and a path of drafts, root first."""
        hidden = self.hidden[:length]
        for end in range(1, len(path) + 1):
            output = HEAD.chain([*self.tokens[1:length], *path[:end]], hidden)[-1]
            hidden = np.concatenate([hidden, output[None]])
        return HEAD.head @ output

    def naive(self, length: int, shape: DraftTree) -> list[int]:
        """Return the tokens that the head drafts after `length` committed rows, every row's root path run whole."""
        tokens = [self.tokens[length]] + [0] * shape.num_drafts
        outputs: dict[int, np.ndarray] = {}
        for row in range(shape.num_rows):
            path = shape.path(row)
            hidden = np.concatenate([self.hidden[:length], *(outputs[node][None] for node in path[:-1])])
            shifted = self.tokens[1:length] + [tokens[node] for node in path]
            outputs[row] = HEAD.chain(shifted, hidden)[-1]
            best = np.argsort(-(HEAD.head @ outputs[row]), kind="stable")
            for rank, child in enumerate(shape.children(row)):
                tokens[child] = int(best[rank])
        return tokens


def make_drafter(num_slots: int = 8) -> MTPDrafter:
    return MTPDrafter(HEAD, num_slots, poison=True)


def propose(
    drafter: MTPDrafter, slots: Sequence[int], tokens: Sequence[int], shapes: Sequence[DraftTree]
) -> list[tuple]:
    roots = [Root(slot, token, shape) for slot, token, shape in zip(slots, tokens, shapes, strict=True)]
    trees = [draft.tree for draft in drafter.propose(roots)]
    assert [tree.parents for tree in trees] == [shape.parents for shape in shapes]
    return [tree.tokens for tree in trees]


def test_trees_equal_the_naive_growth() -> None:
    """Fault G07: six shapes in one batch; each row sees its prefix and its own ancestors, at position P + depth."""
    drafter = make_drafter()
    sequences = [Script(seed) for seed in range(len(SHAPES))]
    slots = [5, 0, 3, 1, 7, 2]
    lengths = [1, 4, 9, 17, 2, 30]
    for slot in slots:
        drafter.allocate(slot)
    drafter.observe([x.rows(slot, 0, n) for x, slot, n in zip(sequences, slots, lengths, strict=True)])
    drafted = propose(drafter, slots, [x.tokens[n] for x, n in zip(sequences, lengths, strict=True)], SHAPES)
    wanted = [tuple(x.naive(n, shape)) for x, n, shape in zip(sequences, lengths, SHAPES, strict=True)]
    assert drafted == wanted


MIXED: list[Shape] = [Budget(16, 4, 3), SHAPES[1], Budget(40, 6, 2), SHAPES[2], Budget(1), Budget(7, 1, 9), SHAPES[4]]


def mixed(drafter: MTPDrafter, lengths: Sequence[int]) -> tuple[list[Script], list[Draft]]:
    """Return sequences of these lengths and what the drafter proposes for them, budgets beside fixed shapes."""
    sequences = [Script(seed) for seed in range(len(MIXED))]
    for slot, (script, length) in enumerate(zip(sequences, lengths, strict=True)):
        drafter.allocate(slot)
        drafter.observe([script.rows(slot, 0, length)])
    roots = [Root(n, x.tokens[lengths[n]], MIXED[n]) for n, x in enumerate(sequences)]
    return sequences, drafter.propose(roots)


def test_budgets_beside_fixed_shapes() -> None:
    """Rows that outlive their neighbours' trees see their own prefix and ancestors; the best tree is the queue's."""
    lengths = [3, 9, 17, 1, 2, 30, 12]
    sequences, drafts = mixed(make_drafter(), lengths)
    for script, length, shape, draft in zip(sequences, lengths, MIXED, drafts, strict=True):
        if isinstance(shape, DraftTree):
            assert draft.tree == shape.with_tokens(script.naive(length, shape))
        else:
            logits_of = lambda path: script.logits(length, path)  # noqa: B023, E731
            assert draft.tree == best_first(logits_of, script.tokens[length], shape)
        assert draft.laws == {}
    assert max(draft.tree.max_depth for draft in drafts) > 3


def test_adapting_leaves_no_tables_behind() -> None:
    """Shapes that follow from the data are new at every step: what is kept of them is bounded."""
    for cached in (packed._cached_pack, packed._nearest_ancestors, tree.topology, cut_to_depth):
        assert cached.cache_info().maxsize <= 512


def test_a_proposal_does_not_depend_on_its_neighbours() -> None:
    drafter = make_drafter()
    one, two = Script(1), Script(2)
    for slot in (0, 1):
        drafter.allocate(slot)
    drafter.observe([one.rows(0, 0, 6), two.rows(1, 0, 11)])
    alone = propose(drafter, [0], [one.tokens[6]], [SHAPES[1]])
    for order in ([0, 1], [1, 0]):
        tokens, shapes = [one.tokens[6], two.tokens[11]], [SHAPES[1], SHAPES[4]]
        both = propose(drafter, order, [tokens[at] for at in order], [shapes[at] for at in order])
        assert both[order.index(0)] == alone[0]


def test_proposing_changes_nothing() -> None:
    """A proposal whose every draft falls leaves no trace: proposing again gives the same."""
    drafter = make_drafter()
    sequence = Script(3)
    drafter.allocate(0)
    drafter.observe([sequence.rows(0, 0, 7)])
    first = propose(drafter, [0], [sequence.tokens[7]], [SHAPES[1]])
    propose(drafter, [0], [sequence.tokens[7]], [SHAPES[4]])
    assert propose(drafter, [0], [sequence.tokens[7]], [SHAPES[1]]) == first
    assert drafter.cache.length(0) == 7


@pytest.mark.parametrize("steps", [[1] * 20, [4, 1, 1, 5, 2, 3, 1, 3], [20], [3, 17]])
def test_any_history_of_steps_gives_the_same_drafts(steps: list[int]) -> None:
    """Faults D09 and L07: committed tokens alone decide the drafts, however they were accepted and whatever was drafted."""
    sequence = Script(4)
    drafter, length = make_drafter(), 0
    drafter.allocate(2)
    for number, size in enumerate(steps):
        drafter.observe([sequence.rows(2, length, length + size)])
        length += size
        if number % 3:  # some steps draft, some do not
            propose(drafter, [2], [sequence.tokens[length]], [SHAPES[number % len(SHAPES)]])
        # The drafter's own rows are dropped: it holds one row per committed row of the target, no more.
        assert drafter.cache.length(drafter._slot_of[2]) == length
    assert propose(drafter, [2], [sequence.tokens[20]], [SHAPES[1]]) == [tuple(sequence.naive(20, SHAPES[1]))]


def test_slots_change_hands() -> None:
    """A freed slot's next tenant starts from nothing; freeing what was never started is no fault."""
    drafter = make_drafter(num_slots=1)
    for seed in range(3):
        sequence = Script(seed)
        drafter.allocate(9)
        drafter.observe([sequence.rows(9, 0, 2 + seed)])
        wanted = [tuple(sequence.naive(2 + seed, SHAPES[3]))]
        assert propose(drafter, [9], [sequence.tokens[2 + seed]], [SHAPES[3]]) == wanted
        drafter.free(9)
        drafter.free(9)
    drafter.free(4)
    drafter.cache.check_integrity()
    assert drafter.cache.num_free == 1
    drafter.allocate(0)
    with pytest.raises(CapacityError):
        drafter.allocate(1)


def test_observing_nothing() -> None:
    make_drafter().observe([])


def test_a_root_alone_beside_one_that_drafts() -> None:
    """At the end of a request nothing is worth drafting; its neighbours' drafts are theirs in any order of the batch."""
    drafter, alone = make_drafter(), DraftTree([-1])
    one, two = Script(1), Script(2)
    for slot in (0, 1):
        drafter.allocate(slot)
    drafter.observe([one.rows(0, 0, 6), two.rows(1, 0, 11)])
    wanted = tuple(two.naive(11, SHAPES[0]))
    assert propose(drafter, [0, 1], [one.tokens[6], two.tokens[11]], [alone, SHAPES[0]])[1] == wanted
    assert propose(drafter, [1, 0], [two.tokens[11], one.tokens[6]], [SHAPES[0], alone])[0] == wanted
    assert propose(drafter, [0, 1], [one.tokens[6], two.tokens[11]], [alone, alone]) == [
        (one.tokens[6],),
        (two.tokens[11],),
    ]


def test_a_freed_slot_keeps_nothing() -> None:
    """Neither a hidden state nor readable keys and values outlive their sequence."""
    drafter, script = make_drafter(2), Script(3)
    for _ in range(3):
        drafter.allocate(5)
        drafter.observe([script.rows(5, 0, 4)])
        drafter.free(5)
    assert not drafter._root_hidden
    assert drafter.cache.num_free == 2
    drafter.cache.check_integrity()
    assert all(torch.isnan(layer.keys).all() and torch.isnan(layer.values).all() for layer in drafter.cache.layers)
