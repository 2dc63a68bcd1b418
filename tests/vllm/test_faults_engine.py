"""Reported faults that only an engine has: steps scheduled ahead, cached prefixes, memory that is short, prompts of one token.

It schedules each step before it knows what the last one accepted, as vLLM does on a GPU.
"""

import random
from collections.abc import Callable

import pytest
from chains import assert_alike, drafting, greedy, prompt

from engine import Report, Request, Run
from tolerances import KERNEL_EXACT

Model = Callable[..., str]
Execute = Callable[[Run], Report]
Reports = tuple[Report, Report]

BLOCK = 256
# Two texts that begin alike and part in their third block.
A = prompt(1, 3 * BLOCK + 40)
B = A[: 2 * BLOCK + 90] + prompt(2, 100)
FIRST, OTHER, AGAIN, BESIDE, FOLLOW_UP, CROWD, GROWING = range(7)
# Place of the request that is continued.
LANDED = 3


def beside() -> list[Request]:
    """Two that draft, a prompt of one token and one of several pieces that land beside them."""
    decoding = [greedy(prompt(20 + number, 12), 16) for number in range(2)]
    return [*decoding, greedy([7], 12, joins=3), greedy(prompt(22, 2 * BLOCK + 70), 8, joins=5)]


def crowd() -> list[Request]:
    """Requests of a few texts that share their beginnings; there are too few blocks to keep them all."""
    draw = random.Random(3)
    texts = [prompt(10 + number, 2 * BLOCK + 60) for number in range(3)]
    return [greedy(texts[number % 3][: draw.choice((300, 540))], 12, joins=number) for number in range(9)]


def growing() -> list[Request]:
    """Four that enter their second blocks, for which there is no room, and end one by one."""
    return [greedy(prompt(40 + number, BLOCK - 12 + number), 16 + 4 * (number % 3)) for number in range(4)]


def rounds() -> list[list[Request]]:
    follow_up = Request(prompt=prompt(23, 9), sampling=greedy([], 12).sampling, continues=(BESIDE, LANDED))
    return [*([greedy(text, 12)] for text in (A, B, A)), beside(), [follow_up], crowd(), growing()]


@pytest.fixture(scope="module")
def reports(model: Model, execute: Execute) -> Reports:
    """What the plugin does with cached prefixes, and what an engine does that neither drafts nor caches."""
    folder = model("dense", remembers=6.0)
    bounds = {"max_model_len": 1024, "max_num_batched_tokens": 2 * BLOCK}
    caching = {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": None,
        "num_gpu_blocks_override": 18,
    }
    ahead = {"prepare": ["scheduling:run_ahead"], "probe": "scheduling:chains"}
    ours = drafting(folder, "reconstruct", rounds=rounds(), arguments=bounds | caching, **ahead)
    return execute(ours), execute(Run(model=folder, rounds=rounds(), arguments=bounds))


def assert_as_judged(reports: Reports, number: int) -> None:
    """Check that a round's outputs are those without drafts and cached prefixes, and that its states are right."""
    ours, theirs = (report.rounds[number] for report in reports)
    assert_alike(theirs.outputs, ours.outputs)
    assert ours.probed["ahead"]
    assert ours.probed["num_checks"] > 5
    assert ours.probed["largest"] <= KERNEL_EXACT


def test_one_text_another_and_the_first_again(reports: Reports) -> None:
    """Faults E01 and E06: its answer is the same bit for bit, and it finds what it left, but for one block.

    vLLM takes a block less than it finds, since its head drafts from the last.
    """
    served = reports[0].rounds
    assert served[FIRST].tokens == served[AGAIN].tokens
    hits = [served[number].counters["prefix_cache_hits"] for number in (FIRST, OTHER, AGAIN)]
    assert hits == [0, 0, 2 * BLOCK]
    for number in (FIRST, OTHER, AGAIN):
        assert_as_judged(reports, number)


def test_prompts_that_land_beside_drafts(reports: Reports) -> None:
    """Faults B06, D05, D06 and D07: one of a single token, which vLLM pads with placeholders, and one in pieces."""
    assert_as_judged(reports, BESIDE)
    assert len(beside()[2].prompt) == 1
    ours, theirs = (report.rounds[BESIDE].tokens[2] for report in reports)
    assert ours == theirs  # not even a near-tie


def test_what_landed_beside_drafts_is_found(reports: Reports) -> None:
    """Fault E07: who continues a text finds states that steps of prompts and drafts left."""
    assert reports[0].rounds[FOLLOW_UP].counters["prefix_cache_hits"] == BLOCK
    assert_as_judged(reports, FOLLOW_UP)


def test_cached_prefixes_where_memory_is_short(reports: Reports) -> None:
    """Fault E10: blocks are taken from texts that others share; nobody repeats a token for ever, and drafts are accepted."""
    assert_as_judged(reports, CROWD)
    served = reports[0].rounds[CROWD]
    # The second of each text would find a block at least, if it were still there.
    assert 0 < served.counters["prefix_cache_hits"] < 6 * BLOCK
    assert all(len(set(output.tokens)) > 4 for output in served.outputs)
    assert sum(max(output.gains) > 1 for output in served.outputs) > 4


def test_preempted_while_a_step_is_in_flight(reports: Reports) -> None:
    """Faults D03 and D04: what comes late of a request that was preempted is nobody's; counts stay with their requests."""
    served = reports[0].rounds[GROWING]
    assert served.counters["num_preemptions"] > 0
    assert [len(output.tokens) for output in served.outputs] == [16, 20, 24, 16]
    assert_as_judged(reports, GROWING)
