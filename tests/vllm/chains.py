"""Requests and comparisons that the tests of chains share."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine import Output, Request, Run, mtp
from tolerances import VLLM_LOGPROB, VLLM_LOGPROB_MEAN, VLLM_LOGPROB_OF_ALL, VLLM_LOGPROB_OF_MOST, VLLM_NEAR_TIE

POLICIES = ("reconstruct", "ring")
DRAFTS = 3
LOGPROBS = 3
# Tokens of a block where prefixes are cached, and the rounds of a conversation.
BLOCK = 256
TALK, ASKED, AGAIN, RESET = range(4)


def drafting(folder: str, commit: str, *, accepted: list[float] | None = None, **options: Any) -> Run:
    """Return an engine that drafts under a policy, with every commit checked, and without rounds."""
    ours = {} if commit == "store_all" else {"mamba_state_commit": commit, "check_every": 1}
    probe = {} if commit == "store_all" else {"probe": "probes:chains"}
    speculative = mtp(DRAFTS, accepted=accepted, **ours)
    return Run(**{"model": folder, "rounds": [], "runner": "v2", "speculative": speculative} | probe | options)


def prompt(seed: int, length: int) -> list[int]:
    """Return token ids that repeat nothing on purpose."""
    return random.Random(seed).choices(range(127), k=length)


def greedy(ids: list[int], num_tokens: int, **options: Any) -> Request:
    """Return a greedy request whose log-probabilities can be compared."""
    return Request(prompt=ids, sampling={"max_tokens": num_tokens, "logprobs": LOGPROBS}, **options)


def conversation(prompt_lens: Sequence[int], num_tokens: int, num_answered: int, block: int = BLOCK) -> dict[str, Any]:
    """Return what an engine with cached prefixes is to serve: what was said is asked about twice, and again when it is forgotten.

    Args:
        prompt_lens: Of the requests that begin.
        num_tokens: That each of them says.
        num_answered: That each question about it says.
        block: Tokens of a block; all that is said, and the questions, take at most four.
    """
    first = [greedy(prompt(length, length), num_tokens) for length in prompt_lens]
    sampling = greedy([], num_answered).sampling
    follow_up = [Request(prompt=[], sampling=sampling, continues=(TALK, place)) for place in range(len(first))]
    return {
        "rounds": [first, follow_up, follow_up, follow_up],
        "resets": [RESET],
        "arguments": {
            "enable_prefix_caching": True,
            "max_model_len": 4 * block,
            # Prompts come in pieces that end at the boundaries.
            "max_num_batched_tokens": 2 * block,
            # Else vLLM keeps states at the end of prompts only.
            "prefix_cache_retention_interval": None,
        },
    }


class Likeness(NamedTuple):
    """How alike two outputs of one request are.

    Attributes:
        agreed: Tokens before the first that differs.
        gap: There, how far the two best tokens of the first output are apart; 0 if none differs.
        off: The largest difference of the log-probabilities that both give, up to there.
    """

    agreed: int
    gap: float
    off: float


def compare(expected: Output, got: Output) -> Likeness:
    """Compare a request's output with what it should be."""
    assert expected.logprobs is not None
    assert got.logprobs is not None
    assert len(expected.tokens) == len(got.tokens)
    agreed = next((i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=True)) if a != b), None)
    both = [
        abs(there[token] - here[token])
        for here, there in zip(expected.logprobs[:agreed], got.logprobs[:agreed], strict=True)
        for token in here.keys() & there.keys()
    ]
    if agreed is None:
        return Likeness(len(expected.tokens), 0.0, max(both))
    best, second = sorted(expected.logprobs[agreed].values(), reverse=True)[:2]
    return Likeness(agreed, best - second, max(both, default=0.0))


def first_token(output: Output) -> Output:
    """Return an output as if it had ended with its first token."""
    return output._replace(tokens=output.tokens[:1], logprobs=output.logprobs[:1])


def assert_alike(expected: Sequence[Output], got: Sequence[Output]) -> None:
    """Check that outputs are equal, but for near-ties, and that at least half of the requests are equal to the end."""
    likenesses = [compare(*pair) for pair in zip(expected, got, strict=True)]
    assert max(likeness.gap for likeness in likenesses) <= VLLM_NEAR_TIE, likenesses
    assert max(likeness.off for likeness in likenesses) <= VLLM_LOGPROB, likenesses
    whole = [likeness.agreed == len(output.tokens) for likeness, output in zip(likenesses, expected, strict=True)]
    assert sum(whole) * 2 >= len(whole), likenesses


def assert_close(
    expected: Sequence[dict[int, float]], got: Sequence[dict[int, float]], *, average: float = VLLM_LOGPROB_MEAN
) -> None:
    """Check log-probabilities of the tokens of one text, each given what comes before it.

    Single ones are off by much without a fault, where experts are nearly tied; a fault of many rows moves the average.
    """
    off = differences(expected, got)
    assert len(off) > 2 * len(got)
    assert sum(off) / len(off) <= average
    assert off[len(off) * 99 // 100] <= VLLM_LOGPROB_OF_MOST
    assert off[-1] <= VLLM_LOGPROB_OF_ALL


def differences(expected: Sequence[dict[int, float]], got: Sequence[dict[int, float]]) -> list[float]:
    """Return how far log-probabilities of the same tokens at the same places are apart, the smallest first."""
    return sorted(
        abs(here[token] - there[token])
        for here, there in zip(expected, got, strict=True)
        for token in here.keys() & there.keys()
    )
