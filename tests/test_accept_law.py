"""Sampled acceptance: the law of the delivered tokens is the target's, exactly, on every tree and for every draft.

Nothing here is sampled. All coins, those that the drafts are drawn with included, are taken every way they can fall, and
laws are compared as fractions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice

import jaxtyping
import numpy as np
import pytest

from exact_law import (
    ROOT,
    Branching,
    Case,
    Drafted,
    Tokens,
    after,
    draft,
    fractions,
    is_lossless,
    law_of,
    outcomes,
    random_case,
    target_rows,
)
from treewy.accept import Accepted, Choice, sampled, walk
from treewy.errors import ShapeError, TreeError
from treewy.sampling import ACCEPT, Stream
from treewy.tree import DraftTree


@pytest.fixture(autouse=True)
def _unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Checking them is a third of the time here, and test_accept.py and the engine's tests check the same calls.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def step(case: Case, coin: Branching, text: Tokens = (ROOT,), rule: Callable[..., Accepted] = sampled) -> Accepted:
    """Draft and accept once; check what any outcome must be."""
    drafted = draft(case, coin, text)
    tree = drafted.tree
    accepted = rule(tree, target_rows(case, tree, text), drafted.laws, coin)
    assert len(accepted.path) == len(accepted.tokens)
    assert accepted.path == tree.path(accepted.path[-1])
    assert [tree.tokens[row] for row in accepted.path[1:]] == accepted.tokens[:-1]
    assert accepted.is_bonus == (not tree.children(accepted.path[-1]))
    return accepted


def delivered(case: Case, rule: Callable[..., Accepted] = sampled) -> dict[Tokens, Fraction]:
    """Return the law of one step's tokens."""
    return law_of(lambda coin: tuple(step(case, coin, rule=rule).tokens))


def cases(num: int, seed: int, **options) -> list[Case]:
    """Return random cases."""
    return [random_case(np.random.default_rng([seed, number]), **options) for number in range(num)]


@pytest.mark.parametrize(
    ("num", "options"),
    [
        (60, {"chain": True, "drawn": 1.0}),
        (20, {"chain": True, "drawn": 0.5}),
        (160, {"drawn": 1.0}),
        (120, {"drawn": 0.6}),
        (60, {"drawn": 0.0}),
    ],
)
def test_the_law_is_the_targets(num: int, options: dict) -> None:
    """Faults H01 and H08: chains and trees, uneven, drawn, chosen and mixed, laws with zeros, points and copies."""
    seen = cases(num, seed=1, **options)
    for case in seen:
        law = delivered(case)
        assert sum(law.values()) == 1
        assert is_lossless(law, case.target, case.shape.max_depth + 2), case.shape
    if options == {"drawn": 1.0}:
        assert sum(case.branches for case in seen) > num / 2, "too few trees with drawn siblings: the test shows little"
        assert sum(map(uses_up, seen)) > num / 10, "too few laws are used up part way"


def uses_up(case: Case) -> bool:
    """Whether the root has more drawn children than its law has tokens."""
    return 0 in case.drawn and np.count_nonzero(case.drafter((ROOT,))) < len(case.shape.children(0))


def test_a_cut_leaves_the_law_alone() -> None:
    """Wherever a step is cut, at a count or at a token, the next one goes on with the right law."""
    for case in cases(30, seed=2, drawn=0.8, max_drafts=12):
        deepest = case.shape.max_depth
        for cut in [*(lambda a, n=n: a.cut(n) for n in range(1, deepest + 2)), stop_at_0]:
            law = law_of(lambda coin, case=case, cut=cut: checked_cut(step(case, coin), cut))
            assert is_lossless(law, case.target, deepest + 2)


def stop_at_0(accepted: Accepted) -> Accepted:
    """Cut after the first token 0, as an end of text would."""
    return accepted.cut(accepted.tokens.index(0) + 1) if 0 in accepted.tokens else accepted


def checked_cut(accepted: Accepted, cut: Callable[[Accepted], Accepted]) -> Tokens:
    short = cut(accepted)
    assert len(short.path) == len(short.tokens) <= len(accepted.tokens)
    assert short.is_bonus == (accepted.is_bonus and len(short.tokens) == len(accepted.tokens))
    return tuple(short.tokens)


def test_two_steps_in_a_row() -> None:
    """The second draft starts where the first step ended, wherever that was."""

    def two_steps(case: Case, coin: Branching) -> Tokens:
        first = tuple(step(case, coin).tokens)
        return first + tuple(step(case, coin, (ROOT, *first)).tokens)

    for case in cases(16, seed=3, drawn=0.7, max_drafts=4):
        law = law_of(lambda coin, case=case: two_steps(case, coin))
        assert is_lossless(law, case.target, 2 * case.shape.max_depth + 3)


def test_a_draft_named_by_a_law_it_was_not_drawn_from() -> None:
    """Fault H02: the drafter's most likely token is one token, not a draw from its softmax."""
    p, q, tree = fractions([".5", ".3", ".2"]), fractions([".7", ".2", ".1"]), DraftTree.chain(1).with_tokens([9, 0])
    for laws, want in (({}, [".5", ".3", ".2"]), ({0: q}, ["5/7", "1/7", "1/7"])):
        first = first_token(lambda coin, laws=laws: sampled(tree, [p, p], laws, coin))
        assert first == fractions(want).tolist()


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ([".2", ".3", ".5"], [".5", ".3", ".2"]),
        # Here more than one token is left of the law when the first sibling falls: its place in q shows.
        ([".1", ".3", ".4", ".2"], [".4", ".2", ".2", ".2"]),
    ],
)
def test_two_siblings_drawn_without_replacement(target: list[str], drafter: list[str]) -> None:
    """Fault H08: the second is tested against the law without the first."""
    p, q, tree = fractions(target), fractions(drafter), DraftTree([-1, 0, 0])

    def run(coin: Branching) -> Accepted:
        one = coin.draw(q)
        two = coin.draw(np.where(np.arange(len(q)) == one, 0, q))
        return sampled(tree.with_tokens([9, one, two]), [p] * 3, {0: q}, coin)

    assert first_token(run, len(p)) == p.tolist()


def first_token(run: Callable[[Branching], Accepted], num_tokens: int = 3) -> list[Fraction]:
    law = law_of(lambda coin: (run(coin).tokens[0],))
    return [law.get((token,), Fraction(0)) for token in range(num_tokens)]


def test_chosen_drafts_change_no_token_of_a_seed() -> None:
    """With one seed, tokens are those of sampling without drafts, one number each, whatever the trees and their tokens."""

    def decode(case: Case, seed: int, *, drafts: bool) -> Tokens:
        text, coin, deepest = (ROOT,), Stream(seed, ACCEPT), 0
        while len(text) < 40:
            tree = draft(case, Branching([]), text).tree if drafts else DraftTree([-1], [text[-1]])
            floats = [law.astype(float) for law in target_rows(case, tree, text)]
            accepted = sampled(tree, floats, {}, coin)
            text, deepest = (*text, *accepted.tokens), max(deepest, len(accepted.path))
        depths.append(deepest)
        return text[:40]

    depths: list[int] = []
    for seed, case in enumerate(cases(60, seed=5, drawn=0.0)):
        assert decode(case, seed, drafts=True) == decode(case, seed, drafts=False)
    assert max(depths) == 4, "no deep draft stood: the test shows little"


def test_rounding_that_leaves_nothing_accepts() -> None:
    """Where the laws are equal a draft stands for sure; a coin that says no has rounded."""

    class Refusing(Branching):
        def flip(self, probability: float) -> bool:
            return False

    law = np.array([0.1, 0.2, 0.7])
    tree = DraftTree([-1, 0, 0], [0, 1, 2])
    assert sampled(tree, [law] * 3, {0: law}, Refusing([])) == Accepted([0, 1], [1, 0], is_bonus=True)


def test_children_past_a_used_up_law_can_stand() -> None:
    """The first child is all that the law could give; the others were chosen, and the model's own token walks to them."""
    p, q = fractions(["1/4", "1/2", "1/4"]), fractions(["1", "0", "0"])
    tree = DraftTree([-1, 0, 0, 0], [9, 0, 1, 2])
    paths = law_of(lambda coin: tuple(sampled(tree, [p] * 4, {0: q}, coin).path))
    assert paths == {(0, 1): p[0], (0, 2): p[1], (0, 3): p[2]}


def test_laws_are_left_as_they_were() -> None:
    """The rule works on copies: the next row, or the next reader, sees the law whole."""
    p, q = fractions(["1/10", "4/10", "5/10"]), fractions(["5/10", "3/10", "2/10"])
    for _ in outcomes(lambda coin: sampled(DraftTree([-1, 0, 0], [0, 0, 1]), [p] * 3, {0: q}, coin)):
        assert p.tolist() == fractions(["1/10", "4/10", "5/10"]).tolist()
        assert q.tolist() == fractions(["5/10", "3/10", "2/10"]).tolist()


@pytest.mark.parametrize(("tokens", "row"), [([9, 2, 0], 1), ([9, 0, 0], 2)])
def test_a_drawn_child_must_have_been_possible(tokens: list[int], row: int) -> None:
    """A token that the law gives nothing, or nothing any more, was not drawn from it."""
    p, q = fractions(["1/10", "4/10", "5/10"]), fractions(["1/2", "1/2", "0"])
    with pytest.raises(TreeError, match=f"row {row} holds {tokens[row]}, of probability 0"):
        list(outcomes(lambda coin: sampled(DraftTree([-1, 0, 0], tokens), [p] * 3, {0: q}, coin)))


def test_what_does_not_fit_is_refused() -> None:
    p = fractions(["1/2", "1/2"])
    with pytest.raises(ShapeError, match="one row per tree row, 3; got 2"):
        sampled(DraftTree.chain(2).with_tokens([0, 1, 1]), [p, p], {}, Branching([]))
    with pytest.raises(ShapeError, match="bare shape"):
        sampled(DraftTree.chain(1), [p, p], {}, Branching([]))


# Rules and drafts with one fault each. The rule below is the package's written out again, so that a fault can be put in.


def written_out(*, keeps_siblings: bool = False, forgets_rejections: bool = False) -> Callable[..., Accepted]:
    def choose(tree: DraftTree, row: int, target: np.ndarray, law: np.ndarray | None, coin: Branching) -> Choice:
        whole, children = target, list(tree.children(row))
        while children and law is not None and law.sum() > 0:
            child = children.pop(0)
            token = tree.tokens[child]
            # With the first fault a law can be kept that gives this token nothing.
            if not law[token] or coin.flip(target[token] / law[token]):
                return Choice(token, child)
            target = np.maximum(target - law, 0)
            if not target.sum() > 0:
                # Only a wrong law leaves nothing.
                return Choice(token, child)
            target = target / target.sum()
            if not keeps_siblings:
                law = np.where(np.arange(len(law)) == token, 0, law)
                law = law / law.sum() if law.sum() else law
        token = coin.draw(whole if forgets_rejections else target)
        return Choice(token, next((child for child in children if tree.tokens[child] == token), None))

    def rule(
        tree: DraftTree, target: Sequence[np.ndarray], laws: Mapping[int, np.ndarray], coin: Branching
    ) -> Accepted:
        return walk(tree, lambda row: choose(tree, row, target[row], laws.get(row), coin))

    return rule


def most_likely_first(case: Case, drafted: Drafted) -> Drafted:
    """Reorder siblings after they are drawn."""
    tokens = list(drafted.tree.tokens)
    for row, law in drafted.laws.items():
        children = case.shape.children(row)
        # Leaves only: a child keeps its subtree.
        if not any(case.shape.children(child) for child in children):
            ordered = sorted((tokens[child] for child in children), key=lambda token: -law[token])
            for child, token in zip(children, ordered, strict=True):
                tokens[child] = token
    return Drafted(case.shape.with_tokens(tokens), drafted.laws)


def best_only(case: Case, drafted: Drafted) -> Drafted:
    """Keep the rows of the most likely draws, one row less than were drawn."""
    tree = drafted.tree
    chances = [Fraction(1)]
    for row in range(1, tree.num_rows):
        law = case.drafter(after((ROOT,), tree.tokens, tree, tree.parents[row]))
        chances.append(chances[tree.parents[row]] * law[tree.tokens[row]])
    kept = tree.best_subtree([float(chance) for chance in chances], tree.num_rows - 1)
    laws = {kept.index(row): law for row, law in drafted.laws.items() if row in kept}
    return Drafted(tree.select(kept), laws)


def most_likely(case: Case, drafted: Drafted) -> Drafted:
    """Draft the most likely tokens, and say that they were drawn."""
    tree, laws = case.shape.with_tokens([ROOT, *drafted.tree.tokens[1:]]), {}
    for row in range(tree.num_rows):
        law = case.drafter(after((ROOT,), tree.tokens, tree, row))
        best = np.argsort([-chance for chance in law], kind="stable").tolist()
        tokens = list(tree.tokens)
        for child, token in zip(tree.children(row), best, strict=False):
            tokens[child] = token
        tree = tree.with_tokens(tokens)
        if np.count_nonzero(law) >= len(tree.children(row)):
            laws[row] = law
    return Drafted(tree, laws)


def with_draft(mend: Callable[[Case, Drafted], Drafted]) -> Callable[[Case], dict[Tokens, Fraction]]:
    def law(case: Case) -> dict[Tokens, Fraction]:
        def run(coin: Branching) -> Tokens:
            drafted = mend(case, draft(case, coin))
            return tuple(sampled(drafted.tree, target_rows(case, drafted.tree), drafted.laws, coin).tokens)

        return law_of(run)

    return law


def wrong_on(law: Callable[[Case], dict[Tokens, Fraction]]) -> Iterator[Case]:
    """Yield the cases with drawn siblings on which a law is not the target's."""
    seen = [case for case in cases(60, seed=4, drawn=1.0, max_drafts=24) if case.branches]
    assert len(seen) > 25
    return (case for case in seen if not is_lossless(law(case), case.target, case.shape.max_depth + 2))


def test_the_rule_written_out_again_is_right() -> None:
    """So what the next test finds is the fault put in, and nothing else."""
    assert next(wrong_on(lambda case: delivered(case, written_out())), None) is None


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(lambda case: delivered(case, written_out(keeps_siblings=True)), id="siblings-not-renormalised"),
        pytest.param(lambda case: delivered(case, written_out(forgets_rejections=True)), id="bonus-from-unreduced-law"),
        pytest.param(with_draft(most_likely), id="softmax-of-an-argmax-draft"),
        pytest.param(with_draft(most_likely_first), id="reordered-after-drawing"),
        pytest.param(with_draft(best_only), id="selected-by-what-was-drawn"),
    ],
)
def test_faults_are_seen(law: Callable[[Case], dict[Tokens, Fraction]]) -> None:
    """Those of tree sampling that are easy to make, each wrong on many trees."""
    assert len(list(islice(wrong_on(law), 6))) == 6
