"""Prefix caching in real vLLM: what was decoded is found again, and its states are those of a prompt of the same tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
from chains import AGAIN, ASKED, BLOCK, POLICIES, RESET, TALK, assert_alike, conversation, drafting

from engine import Report, Run
from tolerances import KERNEL_EXACT, VLLM_STATE


class Talk(NamedTuple):
    """Two requests that decode over block boundaries, the same number of tokens in each step.

    The second block ends with a path, or behind its first row. Where it ends in between vLLM gives the block back before
    it knows that it is full, with the plugin or without.
    """

    accepted: list[float]
    gain: int
    prompt_lens: tuple[int, int]
    num_steps: int


TALKS = {
    "reconstruct": Talk([1.0, 1.0, 0.0], 3, (500, 502), 93),
    # Paths as long as they can be: one ends with its block, in whose page its state lies.
    "ring": Talk([1.0, 1.0, 1.0], 4, (500, 503), 70),
}


def talk(folder: str, commit: str) -> Run:
    """A conversation: what was said is asked about twice, and again when it is forgotten."""
    spoken = TALKS[commit]
    num_tokens = 1 + spoken.gain * spoken.num_steps
    said = conversation(spoken.prompt_lens, num_tokens, 16)
    return drafting(folder, commit, accepted=spoken.accepted, probe="probes:boundaries", **said)


@pytest.mark.parametrize("commit", POLICIES)
def test_a_conversation_finds_what_was_decoded(
    commit: str, model: Callable[..., str], execute: Callable[[Run], Report]
) -> None:
    """Faults B02, E01 and E05: from the end of the second block.

    vLLM takes one block less than it finds, since its head drafts from the last.
    """
    rounds = execute(talk(model("dense", remembers=6.0), commit)).rounds
    hits = [served.counters["prefix_cache_hits"] for served in rounds]
    assert hits == [0, 2 * 2 * BLOCK, 2 * 2 * BLOCK, 0]
    spoken = TALKS[commit]
    gains = [1, *[spoken.gain] * spoken.num_steps]
    assert all(output.gains == gains for output in rounds[TALK].outputs)
    for served in rounds:
        assert served.probed["num_checks"] > 10
        assert served.probed["largest"] <= KERNEL_EXACT
    logprobs = [
        x for served in rounds for output in served.outputs for place in output.logprobs for x in place.values()
    ]
    assert all(map(math.isfinite, logprobs))
    for number in (ASKED, AGAIN):
        assert_alike(rounds[RESET].outputs, rounds[number].outputs)


@pytest.mark.parametrize("commit", POLICIES)
def test_states_at_boundaries_are_those_of_a_prompt(
    commit: str, model: Callable[..., str], execute: Callable[[Run], Report]
) -> None:
    """Fault E02: rebuilt from the page and kept rows while decoding, against vLLM's own chunked kernel.

    That runs after the cache was emptied.
    """
    rounds = execute(talk(model("dense", remembers=6.0), commit)).rounds
    off = rounds[RESET].probed["boundaries"]
    assert 0 < max(off) <= VLLM_STATE
