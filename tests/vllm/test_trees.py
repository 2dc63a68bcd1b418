"""Draft trees in real vLLM, end to end: texts are those without drafts, and states are what the recurrence says.

Requests come and go, are aborted and preempted, and come in pieces; trees are cut where there is no room for them; memory
that nobody owns is not a number.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate

import pytest
import test_chains
from chains import (
    AGAIN,
    ASKED,
    BLOCK,
    LOGPROBS,
    RESET,
    TALK,
    assert_alike,
    assert_close,
    compare,
    conversation,
    first_token,
    prompt,
)
from test_chains import JOINING, LONG_REQUESTS, TEXT_REQUESTS
from trees import BUDGET, LENGTH, NUM_DRAFTS, WIDTHS, accepted_nodes, crowd, drawn, ending, growing, particular

from engine import Output, Report, Request, Run
from tolerances import KERNEL_EXACT, VLLM_LOGPROB, VLLM_STATE

Model = Callable[..., str]
Execute = Callable[[Run], Report]
Reports = tuple[Report, Report]

# Rounds of the main engine and of its judge, by what they are about.
TEXTS, PIECES, CROWD, LONG, ENDING, PARTICULAR, DRAWN = range(7)
# The judge of chains has some of them already.
JUDGED_THERE = {TEXTS: 0, LONG: 1, PIECES: 3}


def bad_words(text: Output) -> list[str]:
    """Return pairs of words that a text has one behind the other."""
    return [f"t{first} t{second}" for first, second in zip(text.tokens[2:14:4], text.tokens[3:15:4], strict=True)]


@pytest.fixture(scope="module")
def chains(model: Model, execute: Execute) -> Reports:
    """What chains make of the same texts, and the judge of both."""
    folder = model("dense")
    return execute(test_chains.main(folder, "reconstruct")), execute(test_chains.undrafted(folder))


@pytest.fixture(scope="module")
def reports(model: Model, execute: Execute, chains: Reports) -> Reports:
    """What the plugin does, and what the same model runner does without drafts, where requests are what it runs.

    Too few blocks for four long requests, too few tokens of a step for four trees, and a context that some of them fill.
    """
    folder, words = model("dense"), bad_words(chains[1].rounds[0].outputs[0])
    own = [crowd(), ending(), particular(words), drawn()]
    bounds = {"max_num_batched_tokens": BUDGET, "num_gpu_blocks_override": 11, "max_model_len": LENGTH}
    rounds = [TEXT_REQUESTS, JOINING, own[0], LONG_REQUESTS, *own[1:]]
    judge = Run(
        model=folder,
        rounds=own,
        runner="v2",
        prepare=["probes:sample_in_torch"],
        arguments={"max_model_len": LENGTH},
    )
    return execute(growing(folder, "reconstruct", WIDTHS, rounds=rounds, arguments=bounds)), execute(judge)


@pytest.fixture
def judged(reports: Reports, chains: Reports) -> Callable[[int], list[Output]]:
    """Return a function that returns what a round should bring."""
    own = {number: place for place, number in enumerate((CROWD, ENDING, PARTICULAR, DRAWN))}

    def get(number: int) -> list[Output]:
        if number in JUDGED_THERE:
            return chains[1].rounds[JUDGED_THERE[number]].outputs
        return reports[1].rounds[own[number]].outputs

    return get


def test_states_are_what_the_recurrence_says(reports: Reports) -> None:
    """Every state that a step reads, against the walk over all accepted rows since the request's prompt."""
    for served in reports[0].rounds:
        assert served.probed["num_checks"] > 20
        assert served.probed["largest"] <= KERNEL_EXACT
        assert max(served.probed["lengths"]) <= served.probed["kept_rows"] == 1 + len(WIDTHS)


@pytest.mark.parametrize("number", [TEXTS, PIECES, LONG, PARTICULAR])
def test_texts_are_those_without_drafts(number: int, reports: Reports, judged: Callable) -> None:
    assert_alike(judged(number), reports[0].rounds[number].outputs)


def test_crowds_that_change_at_every_step(reports: Reports, judged: Callable) -> None:
    """Requests join, end and are aborted, some with prompts of one token, in memory that is not a number."""
    outputs = reports[0].rounds[CROWD].outputs
    for request, got in zip(crowd(), outputs, strict=True):
        if request.aborts is None:
            assert len(got.tokens) == request.sampling["max_tokens"]
        else:
            assert got.reason == "abort"
    whole = [place for place, request in enumerate(crowd()) if request.aborts is None]
    assert sum(len(crowd()[place].prompt) == 1 for place in whole) == 3
    assert_alike(*([outputs[place] for place in whole] for outputs in (judged(CROWD), outputs)))
    assert all(math.isfinite(x) for output in outputs for place in output.logprobs or [] for x in place.values())


def test_preempted_requests_go_on_as_if_nothing_had_been(reports: Reports) -> None:
    """What they kept is gone with their pages; `test_texts_are_those_without_drafts` has their tokens."""
    assert reports[0].rounds[LONG].counters["num_preemptions"] > 0


def test_trees_are_cut_where_there_is_no_room(reports: Reports, judged: Callable) -> None:
    """At the end of the context and where a step has no tokens left: what remains is the first rows of a tree."""
    served, sizes = reports[0].rounds[ENDING], Counter()
    assert [len(output.tokens) for output in served.outputs] == [1, 6, 11, 20]
    assert {output.reason for output in served.outputs} == {"length"}
    assert_alike(judged(ENDING), served.outputs)
    for served in reports[0].rounds:
        sizes.update(size for size, _ in served.probed["paths"])
    assert len(sizes) > 5
    assert sizes[1 + NUM_DRAFTS] > 100
    # Some of them were accepted down to a row that a chain would not have.
    cut = [path for served in reports[0].rounds for size, path in served.probed["paths"] if size < 1 + NUM_DRAFTS]
    assert any(len(path) > 1 for path in cut)


def test_more_is_accepted_than_of_a_chain(reports: Reports, chains: Reports) -> None:
    """At every depth; part of it are drafts that a chain would not have had."""
    served, beside = reports[0].rounds[TEXTS], chains[0].rounds[test_chains.TEXTS]
    shares = [
        [count / counters["spec_decode_num_drafts"] for count in counters["spec_decode_num_accepted_tokens_per_pos"]]
        for counters in (served.counters, beside.counters)
    ]
    assert all(tree >= chain for tree, chain in zip(shares[0][:3], shares[1], strict=True))
    assert not any(shares[0][3:])
    nodes = accepted_nodes(served, WIDTHS)
    assert len(nodes) == served.counters["spec_decode_num_accepted_tokens"]
    others = Counter(depth for depth, sibling in nodes if sibling > 0)
    assert set(others) == {1, 3}  # where there are siblings
    assert others.total() > 0.1 * len(nodes)


def test_what_depends_on_the_past_is_sampled_at_the_root(reports: Reports) -> None:
    """Penalties, bad words and grammars look at what came before a row, which vLLM takes for what lies before it."""
    outputs = reports[0].rounds[PARTICULAR].outputs
    gains = [max(output.gains) for output in outputs]
    depends = [True, False, True, True, True, False, False]
    assert [gain == 1 for gain in gains] == depends
    assert re.fullmatch(r"(t[0-9][0-9]?){9}", outputs[4].text.removesuffix("<end>"))
    assert outputs[0].tokens != reports[0].rounds[TEXTS].outputs[0].tokens[:16]
    stopped = outputs[5]
    assert stopped.reason == "stop"
    assert len(stopped.tokens) > 6
    assert all(token % 4 == 0 for token in outputs[6].tokens)


def test_draws_are_those_without_drafts(reports: Reports, judged: Callable) -> None:
    """vLLM's noise is a function of seed and position, so a tree draws what would have been drawn without it."""
    outputs = reports[0].rounds[DRAWN].outputs
    likenesses = [compare(*pair) for pair in zip(judged(DRAWN), outputs, strict=True)]
    assert max(likeness.off for likeness in likenesses) <= VLLM_LOGPROB
    # Noise has its own near-ties.
    assert sum(likeness.agreed == len(output.tokens) for likeness, output in zip(likenesses, outputs, strict=True)) > 2
    assert max(max(output.gains) for output in outputs) > 2


def test_what_is_counted_is_what_vllm_counts(reports: Reports) -> None:
    """The worker's counts, the histogram that the front end makes of vLLM's, and the paths themselves."""
    before = {
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "accept_lengths": [0] * (1 + len(WIDTHS)),
    }
    for served in reports[0].rounds:
        now = served.probed["counted"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert now[name] - before[name] == served.counters[f"spec_decode_{name}"]
        lengths = [new - old for new, old in zip(now["accept_lengths"], before["accept_lengths"], strict=True)]
        before = now
        paths = Counter(len(path) for _, path in served.probed["paths"])
        assert lengths == [paths[length] for length in range(1, 2 + len(WIDTHS))]
        at_least = served.counters["spec_decode_num_accepted_tokens_per_pos"]
        assert [sum(lengths[depth:]) for depth in (1, 2, 3)] == at_least[:3]
        below = list(accumulate(lengths))
        assert served.counters["treewy_accept_length"] == [*below, below[-1]]


def test_a_tree_without_branches_accepts_what_a_chain_does(model: Model, execute: Execute, chains: Reports) -> None:
    """As many in each step as long as the texts are the same, and almost all of them are."""
    requests = TEXT_REQUESTS[:4]
    (served,) = execute(growing(model("dense"), "reconstruct", (1, 1, 1), rounds=[requests])).rounds
    assert served.probed["largest"] <= KERNEL_EXACT
    beside = chains[0].rounds[test_chains.TEXTS].outputs[:4]
    assert_alike(beside, served.outputs)
    same = [(chain, tree) for chain, tree in zip(beside, served.outputs, strict=True) if chain.tokens == tree.tokens]
    assert len(same) > 2
    assert all(chain.gains == tree.gains for chain, tree in same)
    assert max(max(tree.gains) for _, tree in same) == 4


# A conversation in which each step gains a whole path, of any siblings. With 25 rows, of which it gains 6, the host is far ahead.
DEEP = (3, 1, 2, 1, 1)
# The second block ends with a path, or behind its first row.
PROMPT_LENS, STEPS = (500, 505), 46


def talk(folder: str) -> Run:
    """What was said is asked about twice, and again when it is forgotten; steps are scheduled ahead, as on GPUs."""
    gain = 1 + len(DEEP)
    return growing(
        folder,
        "ring",
        DEEP,
        accepted=[1.0] * len(DEEP),
        probe="probes:tree_boundaries",
        prepare=["scheduling:run_ahead"],
        **conversation(PROMPT_LENS, 1 + gain * STEPS, 14),
    )


@pytest.fixture(scope="module")
def spoken(model: Model, execute: Execute) -> Report:
    """The conversation, with Qwen3-Next, whose states remember it."""
    return execute(talk(model("next", remembers=6.0)))


def test_any_siblings_give_the_states_of_their_path(spoken: Report) -> None:
    """Accepted by chance; the walk takes the rows of the path and no others."""
    for served in spoken.rounds:
        assert served.probed["ahead"]
        assert served.probed["num_checks"] > 10
        assert served.probed["largest"] <= KERNEL_EXACT
    served = spoken.rounds[TALK]
    assert all(output.gains == [1, *[1 + len(DEEP)] * STEPS] for output in served.outputs)
    siblings = Counter(accepted_nodes(served, DEEP))
    assert set(siblings) == {(1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0)}
    for (depth, _), count in siblings.items():
        assert count > 0.6 * siblings.total() / len(DEEP) / DEEP[depth - 1]


def test_log_probabilities_are_those_of_the_same_text_undrafted(spoken: Report, model: Model, execute: Execute) -> None:
    """Teacher-forced: of every token of the conversation, by an engine that neither drafts nor caches."""
    outputs = spoken.rounds[TALK].outputs
    texts = [prompt(length, length) + output.tokens for length, output in zip(PROMPT_LENS, outputs, strict=True)]
    read = [Request(prompt=text, sampling={"max_tokens": 1, "prompt_logprobs": LOGPROBS}) for text in texts]
    judge = Run(model=model("next", remembers=6.0), rounds=[read], arguments={"max_model_len": 1024})
    for length, got, expected in zip(PROMPT_LENS, outputs, execute(judge).rounds[0].outputs, strict=True):
        assert expected.prompt_logprobs is not None
        assert got.logprobs is not None
        assert_close(expected.prompt_logprobs[length - 1 :], got.logprobs)


def test_a_conversation_finds_what_was_decoded(spoken: Report) -> None:
    """From the end of the second block, with the same answer; what comes after that is chance."""
    hits = [served.counters["prefix_cache_hits"] for served in spoken.rounds]
    assert hits == [0, 2 * 2 * BLOCK, 2 * 2 * BLOCK, 0]
    for number in (ASKED, AGAIN):
        pairs = zip(spoken.rounds[RESET].outputs, spoken.rounds[number].outputs, strict=True)
        assert_alike(*zip(*((first_token(expected), first_token(got)) for expected, got in pairs), strict=True))


def test_states_at_boundaries_are_those_of_a_prompt(spoken: Report) -> None:
    """Rebuilt while decoding from rows of any siblings, against vLLM's own chunked kernel, after the cache was emptied."""
    off = spoken.rounds[RESET].probed["boundaries"]
    assert min(off) > 0
    assert max(off) <= VLLM_STATE
