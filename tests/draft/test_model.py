"""A draft model beside the target: its trees against whole root paths, its memory against what was committed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from growth_oracle import best_first, filled
from tolerances import TOY_MEMORY
from toy_oracle import Transcript
from toy_steps import make_pool, memory_error, start, verify
from treewy.accept import sampled
from treewy.draft import Budget, Committed, Draft, Draws, ModelDrafter, Root, Shape
from treewy.errors import RequestError
from treewy.model import ToyConfig, ToyTarget
from treewy.sampling import ACCEPT, DRAFT, Law, Stream
from treewy.tree import DraftTree

MODEL = ToyTarget(ToyConfig(layers="da", vocab_size=40), seed=3)
SHAPES: list[Shape] = [
    DraftTree.chain(3),
    Budget(14, 4, 3),
    DraftTree([-1]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
    Budget(24, 2, 20),
]


def text(seed: int, num_tokens: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 40, num_tokens).tolist()


def make_drafter(num_slots: int = 6, model: ToyTarget = MODEL) -> ModelDrafter:
    return ModelDrafter(model, num_slots, vocab_size=40, poison=True)


def rows(slot: int, tokens: Sequence[int], start: int, end: int) -> Committed:
    """Return what a step that commits rows start..end-1 shows: hidden states are the target's, and of no use here."""
    return Committed(slot, torch.full((end - start, 1), torch.nan), tokens[start + 1 : end + 1], tokens[start])


def wanted(tokens: Sequence[int], shape: Shape, model: ToyTarget = MODEL) -> DraftTree:
    """Return the tree after `tokens`, the last of which is the root: every row's whole root path run anew."""
    before = Transcript(model)
    if tokens[:-1]:
        before.run(tokens[:-1])

    def logits_of(path: Sequence[int]) -> np.ndarray:
        return before.fork().run(path)[-1]

    return (filled if isinstance(shape, DraftTree) else best_first)(logits_of, tokens[-1], shape)


def propose(drafter: ModelDrafter, *roots: Root) -> list[DraftTree]:
    drafts = drafter.propose(roots)
    assert all(draft.laws == {} for draft in drafts)
    return [draft.tree for draft in drafts]


def test_trees_are_the_models_own() -> None:
    """Fixed shapes and budgets in one batch, slots in no order: each row sees its own committed text and its ancestors."""
    drafter, slots, lengths = make_drafter(), [4, 0, 5, 2, 1], [1, 7, 3, 20, 33]
    for slot in slots:
        drafter.allocate(slot)
    texts = [text(slot) for slot in slots]
    drafter.observe([rows(slot, tokens, 0, n) for slot, tokens, n in zip(slots, texts, lengths, strict=True)])
    roots = [Root(slots[n], texts[n][lengths[n]], shape) for n, shape in enumerate(SHAPES)]
    trees = propose(drafter, *roots)
    assert trees == [wanted(texts[n][: lengths[n] + 1], shape) for n, shape in enumerate(SHAPES)]
    assert [propose(drafter, root)[0] for root in roots[::-1]] == trees[::-1], "a tree depends on its neighbours"


@pytest.mark.parametrize("steps", [[1] * 20, [4, 1, 1, 5, 2, 3, 1, 3], [20], [3, 17]])
def test_any_history_of_steps_gives_the_same_drafts(steps: list[int]) -> None:
    """Faults D09 and L07: the model keeps in step, bit for bit: every committed row once, no draft of its own."""
    drafter, tokens, length = make_drafter(), text(9), 0
    drafter.allocate(3)
    for number, size in enumerate(steps):
        drafter.observe([rows(3, tokens, length, length + size)])
        length += size
        if number % 3:  # some steps draft, some do not
            propose(drafter, Root(3, tokens[length], SHAPES[number % len(SHAPES)]))
        assert drafter.cache.length(drafter._slot_of[3]) == length
    transcript = Transcript(MODEL)
    transcript.run(tokens[:20])
    assert memory_error(drafter.cache, drafter._slot_of[3], transcript) < TOY_MEMORY
    assert propose(drafter, Root(3, tokens[20], SHAPES[1])) == [wanted(tokens[:21], SHAPES[1])]


def test_steps_that_commit_for_some() -> None:
    """A sequence that gains nothing in a step stays where it was."""
    drafter, one, two = make_drafter(), text(1), text(2)
    drafter.allocate(0)
    drafter.allocate(1)
    drafter.observe([rows(0, one, 0, 5), rows(1, two, 0, 3)])
    drafter.observe([rows(1, two, 3, 9)])
    drafter.observe([])
    shape = SHAPES[0]
    assert propose(drafter, Root(0, one[5], shape), Root(1, two[9], shape)) == [
        wanted(one[:6], shape),
        wanted(two[:10], shape),
    ]


def test_slots_change_hands() -> None:
    drafter = make_drafter(num_slots=1)
    for seed in range(3):
        tokens = text(seed)
        drafter.allocate(9)
        drafter.observe([rows(9, tokens, 0, 2 + seed)])
        assert propose(drafter, Root(9, tokens[2 + seed], SHAPES[3])) == [wanted(tokens[: 3 + seed], SHAPES[3])]
        drafter.free(9)
        drafter.free(9)
    drafter.free(4)
    drafter.cache.check_integrity()
    assert drafter.cache.num_free == 1


def test_a_context_shorter_than_the_targets() -> None:
    """Rows that the model has no place for are not drafted; what has outgrown it is left alone, and its slot serves again."""
    short = ToyTarget(MODEL.config._replace(max_len=12), seed=3)
    drafter, tokens = make_drafter(1, short), text(5)
    for _ in range(2):
        drafter.allocate(0)
        depths = []
        for length in range(1, 16):
            drafter.observe([rows(0, tokens, length - 1, length)])
            if length < 8:
                continue
            for shape in (DraftTree.from_widths([2, 1, 1]), Budget(9, 3, 2)):
                [tree] = propose(drafter, Root(0, tokens[length], shape))
                left = max(0, 12 - length)
                cut = (
                    Budget(9, min(3, left), 2) if isinstance(shape, Budget) else DraftTree.from_widths([2, 1, 1][:left])
                )
                assert tree == wanted(tokens[: length + 1], cut)
            depths.append(tree.max_depth)
        assert depths == [3, 3, 2, 1, 0, 0, 0, 0]
        drafter.free(0)
    # A step that passes the end in one go, beside a neighbour that does not.
    drafter = make_drafter(2, short)
    drafter.allocate(0)
    drafter.allocate(1)
    drafter.observe([rows(0, tokens, 0, 13), rows(1, tokens, 0, 4)])
    trees = propose(drafter, Root(0, tokens[13], SHAPES[0]), Root(1, tokens[4], SHAPES[0]))
    assert trees == [DraftTree([-1], [tokens[13]]), wanted(tokens[:5], SHAPES[0])]


@pytest.mark.parametrize("law", [Law(temperature=0.5, top_k=5), Law(temperature=2.0, top_p=0.8)])
def test_drafts_of_the_target_itself_all_stand(law: Law) -> None:
    """Where the draft model is the target, a drawn draft's law is the target's: the first of siblings never falls."""
    drafter, pool = make_drafter(), make_pool(MODEL)
    shape, tokens = DraftTree.from_widths([2, 1, 2]), text(6)
    slot = start(MODEL, pool, tokens[:10])
    drafter.allocate(0)
    drafter.observe([rows(0, tokens, 0, 10)])
    trees = set()
    for seed in range(12):
        [draft] = drafter.propose([Root(0, tokens[10], shape, Draws(law, Stream(seed, DRAFT)))])
        target = law.probabilities(verify(MODEL, pool, [draft.tree], [slot]).logits).numpy()
        laws = {row: q.numpy() for row, q in draft.laws.items()}
        assert set(laws) == {0, 1, 2, 3, 4}
        for row, q in laws.items():
            np.testing.assert_allclose(q, target[row], atol=1e-9)
        accepted = sampled(draft.tree, target, laws, Stream(seed, ACCEPT))
        assert accepted.path == [0, 1, 3, 5]
        trees.add(draft.tree)
    assert len(trees) > 5


def test_a_budget_at_a_temperature_is_chosen_by_the_requests_law() -> None:
    """Its rows are the likeliest under the law of the request, none is drawn, and no law is claimed."""
    drafter, tokens, budget = make_drafter(), text(7), Budget(12, 3, 4)
    drafter.allocate(0)
    drafter.observe([rows(0, tokens, 0, 6)])
    before = Transcript(MODEL)
    before.run(tokens[:6])
    trees = set()
    for law in (Law(temperature=0.2), Law(temperature=3.0), Law(top_k=2)):
        stream = Stream(0, DRAFT)
        [draft] = drafter.propose([Root(0, tokens[6], budget, Draws(law, stream))])
        assert draft == Draft(best_first(lambda path: before.fork().run(path)[-1], tokens[6], budget, law), {})
        assert stream.uniform(1) == Stream(0, DRAFT).uniform(1)
        trees.add(draft.tree)
    assert len(trees) == 3


def test_another_vocabulary_is_refused() -> None:
    """Fault L06: at the start, with both sizes."""
    with pytest.raises(RequestError, match="target's vocabulary of 64 tokens; it has 40"):
        ModelDrafter(MODEL, 1, vocab_size=64)
