"""Values that are not finite: they stay where they arose, and are reported."""

import pytest
import torch

from treewy.cache import POLICIES
from treewy.draft import Draft, NoDrafter
from treewy.engine import Engine, Generation, SamplingParams
from treewy.engine.request import check_finite
from treewy.errors import TreeError, TreeWYError
from treewy.model import ToyTarget
from treewy.tree import DraftTree

PROMPTS = [[1] * 3, [2] * 4, [9, 8, 7]]
PARAMS = SamplingParams(max_new_tokens=12)


class Proposes(NoDrafter):
    """Drafts one fixed token below every root that wants drafts, or whatever `trees` makes of the roots."""

    def __init__(self, token: int = 0, trees=None) -> None:
        self.token, self.trees = token, trees

    def propose(self, roots):
        if self.trees:
            return [Draft(tree) for tree in self.trees(roots)]
        return [
            Draft(
                DraftTree([-1, 0, 1, 0], [root.token, self.token, 5, 6])
                if root.shape.num_drafts
                else DraftTree([-1], [root.token])
            )
            for root in roots
        ]


def decode(target: ToyTarget, drafter: NoDrafter, prompts=PROMPTS, commit: str = "reconstruct") -> list[Generation]:
    engine = Engine(target, drafter, shape=DraftTree.chain(2), commit=commit, max_num_seqs=4, poison=True)
    generations = engine.generate(prompts, PARAMS)
    engine.cache.check_integrity()
    assert engine.cache.num_free == 4
    return generations


@pytest.fixture
def spoilt() -> tuple[ToyTarget, int]:
    """A target, and a token it never emits here whose embedding is NaN."""
    target = ToyTarget(seed=5)
    said = {token for generation in decode(target, NoDrafter()) for token in generation.token_ids}
    token = next(t for t in range(target.vocab_size) if t not in said | {token for p in PROMPTS for token in p})
    target.embedding[token] = torch.nan
    return target, token


@pytest.mark.parametrize("commit", POLICIES)
def test_a_rejected_draft_that_is_not_finite_changes_nothing(spoilt: tuple[ToyTarget, int], commit: str) -> None:
    """Fault F10: 0 * NaN is NaN; a bad draft must not spoil its root or its siblings."""
    target, token = spoilt
    plain = [generation.token_ids for generation in decode(target, NoDrafter())]
    drafted = decode(target, Proposes(token), commit=commit)
    assert [generation.token_ids for generation in drafted] == plain
    assert all(generation.finish_reason == "length" for generation in drafted)


@pytest.mark.parametrize("commit", POLICIES)
def test_a_request_that_is_not_finite_ends_in_error_and_alone(spoilt: tuple[ToyTarget, int], commit: str) -> None:
    """Fault F10: NaN stays inside its own request and is reported."""
    target, token = spoilt
    plain = [generation.token_ids for generation in decode(target, NoDrafter())]
    bad, *others = decode(target, Proposes(7), [[1, token, 2], *PROMPTS], commit)
    assert [generation.token_ids for generation in others] == plain
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    with pytest.raises(TreeWYError, match=r"finite.*after 0 new tokens"):
        check_finite(bad)


def test_tokens_before_the_fault_are_kept() -> None:
    target = ToyTarget(seed=5)
    text = decode(target, NoDrafter(), [PROMPTS[0]])[0].token_ids
    place = next(i for i in range(3, 12) if text[i] not in text[:i] and text[i] not in PROMPTS[0])
    target.embedding[text[place]] = torch.nan
    (generation,) = decode(target, NoDrafter(), [PROMPTS[0]])
    assert generation.token_ids == text[: place + 1]
    assert generation.finish_reason == "error"
    assert generation.num_verify_steps == place


ROGUES = {
    "another root": lambda roots: [DraftTree([-1, 0], [root.token + 1, 3]) for root in roots],
    "another order": lambda roots: [DraftTree([-1], [root.token]) for root in reversed(roots)],
    "one tree short": lambda roots: [DraftTree([-1], [root.token]) for root in roots[1:]],
    "bare shapes": lambda roots: [DraftTree([-1, 0]) for root in roots],
}


@pytest.mark.parametrize("rogue", ROGUES)
def test_a_drafter_cannot_change_the_text(rogue: str) -> None:
    """A wrong root would be a wrong text: refused, with the drafter's name."""
    with pytest.raises(TreeError, match="Proposes was given roots"):
        decode(ToyTarget(seed=5), Proposes(trees=ROGUES[rogue]))
