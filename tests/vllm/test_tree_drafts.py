"""A mixture's draft trees in real vLLM against prompts: what follows a text is decided by the text, not by how it came to be.

The head hears hidden rows and the tokens before the last one, so what it drafts depends on the rows that it was given.
"""

import math
from collections.abc import Callable
from itertools import accumulate

import pytest
from chains import assert_close, greedy, prompt
from trees import accepted_nodes, growing

from engine import Report, Round, Run
from tolerances import KERNEL_EXACT, VLLM_NEAR_TIE

Model = Callable[..., str]
Execute = Callable[[Run], Report]

WIDTHS, HEARS = (3, 2, 1), 0.4
LENGTH = 28
TEXTS = [greedy(prompt(60 + i, 12 + i), LENGTH) for i in range(4)]
# Each beginning of each text as a prompt, asked for one token more.
BEGINNINGS = [greedy([], 1, continues=(0, place), keeps=kept) for place in range(len(TEXTS)) for kept in range(LENGTH)]


@pytest.fixture(scope="module")
def rounds(model: Model, execute: Execute) -> list[Round]:
    """Texts, and their beginnings, by one engine."""
    folder = model("moe", hears=HEARS)
    return execute(growing(folder, "reconstruct", WIDTHS, rounds=[TEXTS, BEGINNINGS], probe="probes:drafts")).rounds


def beginning(place: int, kept: int) -> int:
    """Return which of `BEGINNINGS` is of so many tokens of a text."""
    return place * LENGTH + kept


def test_a_mixtures_states_are_what_the_recurrence_says(rounds: list[Round]) -> None:
    """Of drafts of all depths, of which some that are not a parent's first were accepted."""
    served = rounds[0]
    assert served.probed["num_checks"] > 100
    assert served.probed["largest"] <= KERNEL_EXACT
    assert all(served.counters["spec_decode_num_accepted_tokens_per_pos"][: len(WIDTHS)])
    others = [depth for depth, sibling in accepted_nodes(served, WIDTHS) if sibling > 0]
    assert set(others) == {1, 2}
    assert len(others) > 5


def test_a_mixtures_tokens_are_those_after_a_prompt(rounds: list[Round]) -> None:
    """No draft and nothing kept is behind the token of a prompt; log-probabilities are those of the same text."""
    gaps, expected, got = [], [], []
    for place, text in enumerate(rounds[0].outputs):
        got += text.logprobs or []
        for kept, token in enumerate(text.tokens):
            [there] = rounds[1].outputs[beginning(place, kept)].logprobs or []
            gaps.append(max(there.values()) - there.get(token, -math.inf))
            expected.append(there)
    assert max(gaps) <= VLLM_NEAR_TIE
    assert_close(expected, got)


def test_drafts_are_those_after_a_prompt(rounds: list[Round]) -> None:
    """The drafter is given the rows of the accepted path, their tokens, positions and hidden rows, wherever they lay.

    A whole tree's drafts are equal to the last, but for near-ties; seen: 0.91, and 0.69 with the positions of depths left
    in place, 0.40 with tokens or hidden rows left where they lay.
    """
    alike, moved = [], 0
    for place, text in enumerate(rounds[0].outputs):
        drafted = rounds[0].probed["drafts"][f"0.{place}"]
        # After its last step a request may have drafted for a text that was cut.
        steps = list(zip(accumulate(text.gains), text.gains, drafted, strict=True))[:-1]
        for end, gained, drafts in steps:
            number = beginning(place, end - 1)
            if rounds[1].outputs[number].tokens == text.tokens[end - 1 : end]:
                alike.append([drafts] == rounds[1].probed["drafts"][f"1.{number}"])
                moved += gained > 2
    assert len(alike) > 40
    assert moved > 10
    assert sum(alike) > 0.8 * len(alike)
