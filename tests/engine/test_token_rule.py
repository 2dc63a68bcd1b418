"""The rule by which two decoders' tokens are judged: no difference hides behind the first, none passes unseen."""

from collections.abc import Callable

import pytest

from treewy.engine.lossless import (
    NEAR_TIE_GAP,
    Difference,
    Reference,
    Verdict,
    compare_decoders,
    first_difference,
)

TEXT = list(range(100, 140))
PROMPT = [1, 2]


def reference(gap: float = 1.0) -> Callable[[list[int], int], Reference]:
    """Return the undrafted decoder: TEXT after the prompt, all gaps alike."""

    def decode(context: list[int], num_tokens: int) -> Reference:
        done = len(context) - len(PROMPT)
        assert context == PROMPT + TEXT[:done], "after a difference both go on from the reference's tokens"
        return Reference(TEXT[done : done + num_tokens], [gap] * num_tokens)

    return decode


def drafted(*wrong: int) -> Callable[[list[int], int], list[int]]:
    """Return a decoder that errs at these places, and loses its way after each."""

    def decode(context: list[int], num_tokens: int) -> list[int]:
        done = len(context) - len(PROMPT)
        tokens = TEXT[done : done + num_tokens]
        first = next((place - done for place in sorted(wrong) if place >= done), None)
        return tokens if first is None else tokens[:first] + [7] * (num_tokens - first)

    return decode


def test_equal() -> None:
    verdict = compare_decoders(PROMPT, 40, reference(), drafted())
    assert verdict == Verdict([], 40)
    assert verdict.is_equal
    assert verdict.is_lossless


def test_every_difference_is_found() -> None:
    verdict = compare_decoders(PROMPT, 40, reference(0.5), drafted(0, 3, 4, 39))
    assert verdict.differences == [Difference(place, TEXT[place], 7, 0.5) for place in (0, 3, 4, 39)]
    assert verdict.num_tokens == 40
    assert not verdict.is_lossless


@pytest.mark.parametrize(("gap", "wrong", "lossless"), [(5e-5, (3,), True), (2e-4, (3,), False), (5e-5, (3, 9), False)])
def test_near_ties(gap: float, wrong: tuple[int, ...], lossless: bool) -> None:
    """Fault F12: one difference at a gap below 1e-4 is a near-tie, at a wider one it is a fault; two in 40 are one too many."""
    verdict = compare_decoders(PROMPT, 40, reference(gap), drafted(*wrong))
    assert not verdict.is_equal
    assert verdict.is_lossless == lossless


def test_near_ties_are_counted_over_all_prompts() -> None:
    """1 per 10,000 tokens."""
    near = Difference(0, 1, 2, 1e-5)
    assert (Verdict([near], 10_000) + Verdict([near], 10_000)).is_lossless
    assert not (Verdict([near, near], 10_000) + Verdict([near], 10_000)).is_lossless


@pytest.mark.parametrize("gap", [1.0, 5e-5])
def test_an_early_or_late_end_is_a_difference(gap: float) -> None:
    """Too few tokens and too many are no near-tie, whatever the gap there."""
    short = compare_decoders(PROMPT, 5, reference(gap), lambda context, n: TEXT[len(context) - 2 :][: min(n, 4)])
    assert short.differences == [Difference(4, TEXT[4], -1, float("inf"))]
    assert not short.is_lossless
    long = compare_decoders(PROMPT, 5, reference(gap), lambda context, n: TEXT[len(context) - 2 :][: n + 1])
    assert long.differences == [Difference(5, -1, TEXT[5], float("inf"))]
    assert not long.is_lossless


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([1], [1, 2]) == 1
    assert first_difference([], []) is None


def test_a_gap_at_the_bound_is_no_near_tie() -> None:
    at, below = NEAR_TIE_GAP, NEAR_TIE_GAP * 0.999
    assert not Verdict([Difference(0, 1, 2, at)], 100).is_lossless
    assert Verdict([Difference(0, 1, 2, below)], 100).is_lossless
