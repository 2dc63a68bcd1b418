"""Lookup in a sequence's own past, against a search over the whole text."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewy.draft import Budget, Committed, Draws, NgramDrafter, Root, Shape
from treewy.errors import RequestError
from treewy.sampling import DRAFT, Law, Stream
from treewy.tree import DraftTree


def searched(text: Sequence[int], shape: Shape, max_n: int, min_n: int, max_matches: int) -> DraftTree:
    """Return the tree by its definition: every place compared, every shared beginning counted."""
    matches = []
    for start in range(1, len(text)):
        length = 0
        while length < min(max_n, start) and text[start - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= min_n:
            matches.append((length, start))
    matches = sorted(matches, reverse=True)[:max_matches]
    worth: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for length, start in matches:
        for depth in range(1, min(shape.max_depth, len(text) - start) + 1):
            path = tuple(text[start : start + depth])
            longest, count, newest = worth.get(path, (0, 0, 0))
            worth[path] = (max(longest, length), count + 1, max(newest, start))
    width = (
        shape.max_children if isinstance(shape, Budget) else max(len(shape.children(r)) for r in range(shape.num_rows))
    )

    def rank(path: tuple[int, ...]) -> int:
        siblings = [other for other in worth if other[:-1] == path[:-1]]
        return sorted(siblings, key=worth.__getitem__, reverse=True).index(path)

    eligible = [path for path in worth if all(rank(path[:end]) < width for end in range(1, len(path) + 1))]
    best = sorted(eligible, key=lambda path: (*(-x for x in worth[path]), len(path)))[: shape.num_rows - 1]
    rows: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.max_depth + 1):
        level = [path for path in best if len(path) == depth]
        rows += sorted(level, key=best.index)
    parents = [rows.index(path[:-1]) if path else -1 for path in rows]
    return DraftTree(parents, [path[-1] if path else text[-1] for path in rows])


def committed(slot: int, text: Sequence[int], start: int, end: int) -> Committed:
    """Return what a step that commits rows start..end-1 of `text` shows."""
    return Committed(slot, torch.zeros(end - start, 1), list(text[start + 1 : end + 1]), text[start])


def show(drafter: NgramDrafter, slot: int, text: Sequence[int], sizes: Sequence[int] = ()) -> None:
    """Show the drafter a text whose last token is the root, in steps of these sizes and a last one of what is left."""
    start = 0
    for size in (*sizes, len(text)):
        end = min(start + size, len(text) - 1)
        if end > start:
            drafter.observe([committed(slot, text, start, end)])
        start = end


def tree(drafter: NgramDrafter, slot: int, text: Sequence[int], shape: Shape) -> DraftTree:
    [draft] = drafter.propose([Root(slot, text[-1], shape)])
    assert draft.laws == {}
    return draft.tree


SHAPES = st.one_of(
    st.builds(Budget, st.integers(1, 12), st.integers(0, 5), st.integers(1, 3)),
    st.integers(0, 5).map(DraftTree.chain),
    st.lists(st.integers(1, 3), max_size=3).map(DraftTree.from_widths),
    st.just(DraftTree([-1, 0, 0, 0, 3])),
)
TEXTS = st.lists(st.integers(0, 2), min_size=2, max_size=40) | st.lists(st.integers(0, 1), min_size=2, max_size=40)


@given(text=TEXTS, shape=SHAPES, lengths=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 1)]), data=st.data())
def test_trees_equal_the_search(text: list[int], shape: Shape, lengths: tuple[int, int], data: st.DataObject) -> None:
    """Whatever steps the text came in; and one tree of one slot after others of others."""
    max_matches = data.draw(st.sampled_from([1, 3, 32]))
    drafter = NgramDrafter(max_n=lengths[0], min_n=lengths[1], max_matches=max_matches)
    drafter.allocate(3)
    show(drafter, 3, text, data.draw(st.lists(st.integers(1, 9), max_size=6)))
    assert tree(drafter, 3, text, shape) == searched(text, shape, *lengths, max_matches)


def test_drafts_follow_a_text_as_it_grows() -> None:
    """Every step of a long text: the index that grew with it is the index of the whole."""
    text = [t % 7 * (t % 5) % 4 for t in range(120)]
    drafter = NgramDrafter(max_n=3)
    drafter.allocate(0)
    budget, drafted = Budget(9, 4, 3), 0
    for end in range(1, len(text)):
        drafter.observe([committed(0, text, end - 1, end)])
        got = tree(drafter, 0, text[: end + 1], budget)
        assert got == searched(text[: end + 1], budget, 3, 1, 32)
        drafted += got.num_drafts
    assert drafted > 400


@pytest.mark.parametrize(
    ("text", "shape", "parents", "tokens"),
    [
        # 1 2 came three times: twice before 5, last before 6.
        ([1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], DraftTree.chain(1), [-1, 0], [2, 5]),
        ([1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], DraftTree.chain(2), [-1, 0, 1], [2, 5, 8]),
        ([1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], Budget(6, 2, 2), [-1, 0, 0, 2, 1, 1], [2, 5, 6, 9, 8, 7]),
        ([1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], Budget(3, 2, 2), [-1, 0, 0], [2, 5, 6]),
        # A longer match beats two shorter ones.
        ([0, 1, 2, 5, 9, 1, 2, 6, 8, 1, 2, 6, 7, 0, 1, 2], DraftTree.chain(1), [-1, 0], [2, 5]),
        # Nothing comes after the newest tokens themselves, and nothing before the first.
        ([4, 4, 4], DraftTree.chain(3), [-1, 0], [4, 4]),
        ([1, 2, 3], DraftTree.chain(3), [-1], [3]),
        ([1, 2], DraftTree.chain(3), [-1], [2]),
    ],
)
def test_by_hand(text: list[int], shape: Shape, parents: list[int], tokens: list[int]) -> None:
    drafter = NgramDrafter(max_n=3, min_n=2)
    drafter.allocate(0)
    show(drafter, 0, text)
    assert tree(drafter, 0, text, shape) == DraftTree(parents, tokens)


def test_a_slot_knows_its_own_text_only() -> None:
    """Neighbours and the tenant before leave nothing; slots that were never started may be freed."""
    drafter = NgramDrafter(max_n=2)
    texts = {0: [1, 2, 3, 1, 2], 4: [1, 2, 9, 1, 2], 2: [7, 7, 2]}
    for slot in texts:
        drafter.allocate(slot)
    drafter.observe([committed(slot, text, 0, len(text) - 1) for slot, text in texts.items()])
    chain = DraftTree.chain(1)
    drafts = drafter.propose([Root(slot, 2, chain) for slot in (4, 0, 2)])
    assert [draft.tree.tokens for draft in drafts] == [(2, 9), (2, 3), (2,)]
    drafter.free(0)
    drafter.free(0)
    drafter.allocate(0)
    show(drafter, 0, [5, 2])
    assert tree(drafter, 0, [5, 2], chain).tokens == (2,)


def test_nothing_is_drawn() -> None:
    """Fault H02: a request that wants drawn drafts gets chosen ones, without a law, and keeps its numbers."""
    drafter, text = NgramDrafter(), [1, 2, 3, 1, 2]
    drafter.allocate(0)
    show(drafter, 0, text)
    stream = Stream(3, DRAFT)
    [draft] = drafter.propose([Root(0, 2, DraftTree.chain(2), Draws(Law(), stream))])
    assert (draft.tree.tokens, draft.laws) == ((2, 3, 1), {})
    assert stream.uniform(2).tolist() == Stream(3, DRAFT).uniform(2).tolist()


def test_a_step_costs_its_tokens_and_matches() -> None:
    """However long the text: the places read are the matches, at most as many as allowed, and the index is appended to."""

    class Counted(list):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    drafter = NgramDrafter(max_n=4, min_n=1, max_matches=8)
    costs = []
    for length in (200, 4000):
        drafter.allocate(length)
        show(drafter, length, [n % 3 for n in range(length)])
        text = drafter._texts[length]
        text.tokens = Counted(text.tokens)
        Counted.reads = 0
        drafter.observe([committed(length, [1, 0, 1], 0, 2)])
        drafter.propose([Root(length, 1, Budget(20, 5, 3))])
        costs.append(Counted.reads)
    assert costs[0] == costs[1] < 30


@pytest.mark.parametrize("options", [{"min_n": 0}, {"max_n": 1, "min_n": 2}, {"max_matches": 0}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        NgramDrafter(**options)
