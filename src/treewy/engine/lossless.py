"""The token rule of docs/lossless.md: two decoders compared, near-ties admitted, nothing hidden behind the first one."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

# In float32 two paths of the same arithmetic may order two logits differently only when they are this close.
NEAR_TIE_GAP = 1e-4
TOKENS_PER_NEAR_TIE = 10_000


class Reference(NamedTuple):
    """Undrafted tokens, and the top-2 logit gap at each."""

    token_ids: Sequence[int]
    gaps: Sequence[float]


class Difference(NamedTuple):
    """A place where two decoders chose different tokens, and how close the undrafted choice was."""

    index: int
    expected: int
    got: int
    gap: float


class Verdict(NamedTuple):
    """All differences over `num_tokens` compared tokens."""

    differences: list[Difference]
    num_tokens: int

    @property
    def is_equal(self) -> bool:
        """Whether no token differs."""
        return not self.differences

    @property
    def is_lossless(self) -> bool:
        """Whether every difference is a near-tie, and they are at most 1 per 10,000 tokens (or a single one)."""
        allowed = max(1, self.num_tokens // TOKENS_PER_NEAR_TIE)
        return all(x.gap < NEAR_TIE_GAP for x in self.differences) and len(self.differences) <= allowed

    def __add__(self, other: object) -> "Verdict":
        if not isinstance(other, Verdict):
            return NotImplemented
        return Verdict(self.differences + other.differences, self.num_tokens + other.num_tokens)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first index at which the streams differ, an early end included; None if they are equal."""
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def compare_decoders(
    prompt: Sequence[int],
    num_tokens: int,
    reference: Callable[[list[int], int], Reference],
    drafted: Callable[[list[int], int], Sequence[int]],
) -> Verdict:
    """Compare a decoder with the undrafted one over `num_tokens` tokens.

    After a difference both go on from the reference's tokens (teacher-forced), so that one near-tie cannot hide what
    follows it.

    Args:
        prompt: Token ids.
        num_tokens: Tokens to compare.
        reference: Maps (prompt, tokens wanted) to undrafted tokens and gaps.
        drafted: Maps the same to the other decoder's tokens.
    """
    context, left, done = list(prompt), num_tokens, 0
    differences: list[Difference] = []
    while left > 0:
        expected = reference(context, left)
        got = drafted(context, left)
        index = first_difference(expected.token_ids, got)
        if index is None or index >= len(expected.token_ids):
            if index is not None:
                differences.append(Difference(done + index, -1, got[index], float("inf")))
            return Verdict(differences, done + len(expected.token_ids))
        # An early end is no choice between two close tokens: no gap excuses it.
        token, gap = (got[index], expected.gaps[index]) if index < len(got) else (-1, float("inf"))
        differences.append(Difference(done + index, expected.token_ids[index], token, gap))
        context += expected.token_ids[: index + 1]
        done, left = done + index + 1, left - index - 1
    return Verdict(differences, done)
