"""Chains in real vLLM, end to end: texts are those without drafts, and states are what the recurrence says.

Requests come and go, are aborted and preempted, and come in pieces; memory that nobody owns is not a number.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import pytest
from chains import DRAFTS, POLICIES, assert_alike, drafting, greedy, prompt
from openai import OpenAI
from server import serve

from engine import EngineError, Output, Report, Request, Run, mtp
from tolerances import KERNEL_EXACT

Model = Callable[..., str]
Execute = Callable[[Run], Report]

# Rounds of the main engine, by what they are about.
CROWD, AGAIN, TEXTS, SAMPLED, ABORTED, GRAMMARS = range(6)
TEXT_REQUESTS = [greedy(prompt(seed, length), 48) for seed, length in enumerate((30, 4, 17, 2, 60, 9))]
LONG_REQUESTS = [greedy(prompt(10 + seed, 226 + seed), 40) for seed in range(4)]
# Of the plugin under "ring": 3 layers of 4 x 16 kept rows and 16 of a step, and 4 counts.
ROW_BYTES = 3 * 80 * 1312 + 4 * 4
# Tokens of a step where prompts come in pieces: three requests that decode leave one, or a few when one of them ends.
BUDGET = 3 * (1 + DRAFTS) + 1
# The last piece is one token.
PIECES = [greedy(prompt(20, 2 * BUDGET + 1), 12), greedy(prompt(21, BUDGET + 1), 12)]
JOINING = [
    greedy(prompt(0, 30), 40),
    greedy(prompt(1, 4), 24),
    greedy(prompt(5, 9), 32),
    greedy(prompt(22, 40), 16, joins=8),
    greedy(prompt(23, 33), 16, joins=9),
]
# The first two outgrow the blocks within eight steps, and the second gives way.
URGENT = [
    greedy(prompt(1, 240), 60),
    greedy(prompt(2, 236), 40, priority=5),
    greedy(prompt(3, 20), 12, priority=1, joins=10),
]


def crowd() -> list[Request]:
    """Fifty short requests that join over sixteen steps, of other lengths each.

    No prompt of one token: those are tried in `test_faults_engine`.
    """
    draw = random.Random(7)
    return [
        greedy(prompt(100 + i, draw.randint(2, 40)), draw.randint(1, 7), joins=draw.randint(0, 16)) for i in range(50)
    ]


def sampled() -> list[Request]:
    return [
        Request(prompt=prompt(i, 12), sampling={"max_tokens": 24, "temperature": 0.8, "seed": i, "logprobs": 3})
        for i in range(4)
    ]


def aborted() -> list[Request]:
    """Requests that are cut short, and others that take their places at once."""
    cut = [greedy(prompt(40 + i, 20), 64, aborts=4 + i) for i in range(4)]
    return cut + [replace(request, joins=4 + i) for i, request in enumerate(TEXT_REQUESTS)]


def grammars() -> list[Request]:
    """Two grammars that allow few tokens, one that allows most, and a request without any beside them."""
    asked = (
        {"choice": ["t1t2t3t4t5t6t7t8", "t9t8t7t6t5t4t3t2t1"]},
        {"regex": r"(t[1-9]){12}"},
        {"regex": r"(t[0-9][0-9]?){24}"},
    )
    sampling = {"max_tokens": 40, "ignore_eos": False}
    held = [
        Request(prompt=prompt(50 + i, 8), sampling=sampling | {"structured_outputs": x}) for i, x in enumerate(asked)
    ]
    return [*held, greedy(prompt(0, 30), 48)]


def main(folder: str, commit: str) -> Run:
    rounds = [crowd(), crowd(), TEXT_REQUESTS, sampled(), aborted(), grammars()]
    return drafting(folder, commit, rounds=rounds, probe="probes:poisoned")


def undrafted(folder: str) -> Run:
    """The judge: nothing drafted, blocks and tokens of a step in plenty, another model runner."""
    return Run(model=folder, rounds=[TEXT_REQUESTS, LONG_REQUESTS, PIECES, JOINING, URGENT])


def stock(folder: str) -> Run:
    """A state per draft. Here the bytes of the plugin's rows are blocks as well."""
    arguments = {"kv_cache_memory_bytes": 2**30 + ROW_BYTES}
    variables = {"VLLM_CPU_KVCACHE_SPACE": None}
    return drafting(folder, "store_all", rounds=[TEXT_REQUESTS], arguments=arguments, environment=variables)


def cramped(folder: str, commit: str) -> Run:
    """Too few blocks for four requests that grow."""
    return drafting(folder, commit, rounds=[LONG_REQUESTS], arguments={"num_gpu_blocks_override": 13})


def trickling(folder: str, commit: str) -> Run:
    """Prompts come in pieces, of one token too; such a piece runs as decoding does, and the next may not."""
    rounds = [*([request] for request in PIECES), JOINING]
    return drafting(folder, commit, rounds=rounds, arguments={"max_num_batched_tokens": BUDGET})


@pytest.mark.parametrize("commit", POLICIES)
def test_states_are_what_the_recurrence_says(commit: str, model: Model, execute: Execute) -> None:
    """Every state that a step reads, against the walk over all accepted rows since the request's prompt."""
    report = execute(main(model("dense"), commit))
    for served in report.rounds:
        assert served.probed["num_checks"] > 20
        assert served.probed["largest"] <= KERNEL_EXACT
        assert max(served.probed["lengths"]) <= served.probed["kept_rows"]
    assert sum(served.probed["num_checks"] for served in report.rounds) > 1000
    # Some steps accept nothing and some much.
    counters = report.rounds[TEXTS].counters
    by_depth = [
        count / counters["spec_decode_num_drafts"] for count in counters["spec_decode_num_accepted_tokens_per_pos"]
    ]
    assert 0.9 > by_depth[0] > 0.3
    assert by_depth[0] > by_depth[1] > by_depth[2] > 0


@pytest.mark.parametrize("commit", ["store_all", *POLICIES])
def test_texts_are_those_without_drafts(commit: str, model: Model, execute: Execute) -> None:
    """Faults A04 and A10: of several requests at once, through layers of both kinds."""
    folder = model("dense")
    expected = execute(undrafted(folder)).rounds[0].outputs
    run, number = (stock(folder), 0) if commit == "store_all" else (main(folder, commit), TEXTS)
    assert_alike(expected, execute(run).rounds[number].outputs)


@pytest.mark.parametrize("commit", POLICIES)
def test_memory_of_others_is_never_read(commit: str, model: Model, execute: Execute) -> None:
    """Faults B06, C06 and L03: the second crowd is served bit for bit alike.

    It meets pages, kept rows and rows of steps that are not numbers.
    """
    clean, poisoned = (execute(main(model("dense"), commit)).rounds[number] for number in (CROWD, AGAIN))
    assert len(clean.outputs) == 50
    assert clean.outputs == poisoned.outputs
    assert all(math.isfinite(x) for output in poisoned.outputs for place in output.logprobs for x in place.values())


@pytest.mark.parametrize("commit", POLICIES)
def test_places_of_aborted_requests_are_as_new(commit: str, model: Model, execute: Execute) -> None:
    """Fault C12: for others that take them at once."""
    report = execute(main(model("dense"), commit))
    outputs = report.rounds[ABORTED].outputs
    assert {output.reason for output in outputs[:4]} == {"abort"}
    assert all(0 < len(output.tokens) < 64 for output in outputs[:4])
    assert_alike(execute(undrafted(model("dense"))).rounds[0].outputs, outputs[4:])


@pytest.mark.parametrize("commit", POLICIES)
def test_grammars_hold(commit: str, model: Model, execute: Execute) -> None:
    """Faults A02 and D09: requests have rows of all numbers down to one.

    Drafts that break a grammar are dropped before they are verified.
    """
    report = execute(main(model("dense"), commit))
    served = report.rounds[GRAMMARS]
    for request, output in zip(grammars()[:3], served.outputs, strict=False):
        asked = request.sampling["structured_outputs"]
        text = output.text.removesuffix("<end>")
        assert text in asked["choice"] if "choice" in asked else re.fullmatch(asked["regex"], text), text
        assert output.reason == "stop"
    assert max(served.outputs[2].gains) > 1
    assert_alike(report.rounds[TEXTS].outputs[:1], served.outputs[3:])


@pytest.mark.parametrize("commit", POLICIES)
def test_preempted_requests_go_on_as_if_nothing_had_been(commit: str, model: Model, execute: Execute) -> None:
    """Fault D04: what they kept is gone with their pages."""
    (served,) = execute(cramped(model("dense"), commit)).rounds
    assert served.counters["num_preemptions"] > 0
    assert served.probed["largest"] <= KERNEL_EXACT
    assert_alike(execute(undrafted(model("dense"))).rounds[1].outputs, served.outputs)


@pytest.mark.parametrize("commit", POLICIES)
def test_prompts_in_pieces(commit: str, model: Model, execute: Execute) -> None:
    """Faults D01 and L02: also while others decode, and with pieces of one token, which run as decoding does."""
    report, judge = execute(trickling(model("dense"), commit)), execute(undrafted(model("dense")))
    alone = [served.outputs[0] for served in report.rounds[:2]]
    assert_alike(judge.rounds[2].outputs, alone)
    assert_alike(judge.rounds[3].outputs, report.rounds[2].outputs)
    for served in report.rounds:
        assert served.probed["num_checks"] > 10
        assert served.probed["largest"] <= KERNEL_EXACT


def test_the_start_up_log_is_vllms_to_the_token(model: Model, execute: Execute) -> None:
    """Faults J03 and J04: what the plugin says of itself is what vLLM says, and what it says of vLLM without it as well."""
    ours = execute(main(model("dense"), "ring"))
    said = re.search(r"([\d,]+) KV tokens, ([\d.]+) requests; without treewy ([\d,]+) and ([\d.]+)", ours.log)
    beside = re.search(r"treewy: ([\d,]+) bytes of rows beside the blocks", ours.log)
    assert said is not None
    assert beside is not None
    assert logged(ours) == (said[1], said[2])
    assert int(beside[1].replace(",", "")) == ROW_BYTES
    theirs = execute(stock(model("dense")))
    assert logged(theirs) == (said[3], said[4])
    assert (ours.num_blocks, theirs.num_blocks) == (4096, 4097)


def logged(report: Report) -> tuple[str, str]:
    """Return what vLLM's log says of its blocks: tokens, and requests of the longest context."""
    found = re.search(
        r"KV cache size: ([\d,]+) tokens, Maximum concurrency for 512 tokens per request: ([\d.]+)x", report.log
    )
    assert found is not None
    return found[1], found[2]


def counted_in(report: Report, number: int) -> dict[str, Any]:
    """Return what the plugin counted in a round: the first, or one behind another."""
    now = report.rounds[number].probed["counted"]
    then = report.rounds[number - 1].probed["counted"] if number else {}
    return {name: value - then.get(name, 0) for name, value in now.items() if isinstance(value, int)} | {
        "accept_lengths": [
            count - before
            for count, before in zip(now["accept_lengths"], then.get("accept_lengths", [0] * 4), strict=True)
        ]
    }


def folds_of(output: Output, capacity: int, held: int = 0) -> int:
    """Return how often a request's kept rows went into its state, from what its steps gained it after its prompt.

    Args:
        output: The request's.
        capacity: Rows that it may keep.
        held: Rows that it keeps of its prompt.
    """
    folds = 0
    for gained in output.gains[1:]:
        if held + 1 + DRAFTS > capacity:
            folds, held = folds + 1, 0
        held += gained
    return folds


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("commit", POLICIES)
def test_what_is_counted_is_what_vllm_counts(commit: str, runner: str, model: Model, execute: Execute) -> None:
    """The worker's counts, and the histogram that the front end makes of vLLM's; folds are those of the rule."""
    folder = model("dense")
    run, rounds = (main(folder, commit), (CROWD, TEXTS)) if runner == "v2" else (trickling(folder, commit), (0, 1, 2))
    report = execute(replace(run, runner=runner))
    capacity = report.rounds[0].probed["kept_rows"]
    for number in rounds:
        served, counted = report.rounds[number], counted_in(report, number)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert counted[name] == served.counters[f"spec_decode_{name}"]
        at_least = served.counters["spec_decode_num_accepted_tokens_per_pos"]
        assert [sum(counted["accept_lengths"][depth:]) for depth in (1, 2, 3)] == at_least
        assert served.counters["treewy_accepted_drafts"] == counted["num_accepted_tokens"]
        below = list(accumulate(counted["accept_lengths"]))
        assert served.counters["treewy_accept_length"] == [*below, below[-1]]
        # Under the first runner the last token of a prompt verifies if it comes alone; in a crowd that is the scheduler's choice.
        alone, crowded = runner == "v1", runner == "v1" and len(served.outputs) > 1
        least, most = (sum(folds_of(output, capacity, held) for output in served.outputs) for held in (0, 1))
        assert (least if not alone or crowded else most) <= counted["num_folds"] <= (most if alone else least)
        assert counted["num_steps"] < served.steps
        assert counted["num_full_graph_steps"] == 0


def test_bytes_are_those_of_the_storages(model: Model, execute: Execute) -> None:
    """As the start-up log has them, and vLLM's own: its blocks, of which there are as many as one is told."""
    whole, few = execute(main(model("dense"), "ring")), execute(cramped(model("dense"), "ring"))
    said = re.search(r"blocks of .* and ([\d,]+) bytes: .* ([\d,]+) of them used by a state", few.log)
    assert said is not None
    block_bytes, state_bytes = (int(number.replace(",", "")) for number in said.groups())
    for report in (whole, few):
        counted = report.rounds[0].probed["counted"]
        assert counted["rows_bytes"] == ROW_BYTES
        assert counted["state_bytes"] == 3 * state_bytes
        assert counted["pages_bytes"] == report.num_blocks * block_bytes


@pytest.mark.parametrize("name", ["moe", "next"])
def test_other_families(name: str, model: Model, execute: Execute) -> None:
    requests = [greedy(prompt(60 + i, 20), 32) for i in range(2)]
    (served,) = execute(drafting(model(name), "reconstruct", rounds=[requests])).rounds
    assert served.probed["num_checks"] > 50
    assert served.probed["largest"] <= KERNEL_EXACT
    assert served.counters["spec_decode_num_accepted_tokens"] > 5
    (judge,) = execute(Run(model=model(name), rounds=[requests])).rounds
    assert_alike(judge.outputs, served.outputs)


@pytest.mark.parametrize("commit", POLICIES)
def test_the_first_runner(commit: str, model: Model, execute: Execute) -> None:
    """It names requests and moves them about in its batch: preempted, in pieces, and joining while others decode."""
    folder = model("dense")
    reports = [execute(replace(run, runner="v1")) for run in (cramped(folder, commit), trickling(folder, commit))]
    rounds, judge = [served for report in reports for served in report.rounds], execute(undrafted(folder))
    assert all("gpu_model_runner" in report.runner or "cpu_model_runner" in report.runner for report in reports)
    assert rounds[0].counters["num_preemptions"] > 0
    for served in rounds:
        assert served.probed["num_checks"] > 10
        assert served.probed["largest"] <= KERNEL_EXACT
    alone = [served.outputs[0] for served in rounds[1:3]]
    for expected, got in zip(judge.rounds[1:4], (rounds[0].outputs, alone, rounds[3].outputs), strict=True):
        assert_alike(expected.outputs, got)
    counters = rounds[0].counters
    assert counters["spec_decode_num_accepted_tokens"] > 0.1 * counters["spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_who_goes_first_takes_the_place_of_who_waits(
    runner: Literal["v1", "v2"], model: Model, execute: Execute
) -> None:
    """Of two requests one loses its blocks, and while it waits a more urgent third one runs in its place."""
    folder = model("dense")
    arguments = {"max_num_seqs": 2, "num_gpu_blocks_override": 8, "scheduling_policy": "priority"}
    run = replace(drafting(folder, "reconstruct", rounds=[URGENT], arguments=arguments), runner=runner)
    (served,) = execute(run).rounds
    assert served.counters["num_preemptions"] > 0
    assert served.probed["largest"] <= KERNEL_EXACT
    assert_alike(execute(undrafted(folder)).rounds[4].outputs, served.outputs)


def test_what_the_first_runner_cannot_is_refused_by_name(model: Model, execute: Execute) -> None:
    """In the process that a user starts, before a model is loaded."""
    with pytest.raises(EngineError) as caught:
        execute(
            replace(drafting(model("dense"), "reconstruct", arguments={"enable_prefix_caching": True}), runner="v1")
        )
    assert "needs vLLM's Model Runner V2; this configuration runs on V1" in str(caught.value)
    assert "On a CPU, where V2 wants a Triton that compiles for it, pass --no-enable-prefix-caching (" in str(
        caught.value
    )
    assert "Loading weights took" not in caught.value.log


def test_the_server_takes_the_option(model: Model, execute: Execute) -> None:
    """Fault L10: from the command line to the worker, a process of its own; the texts are the engine's."""
    request = TEXT_REQUESTS[0]
    run = Run(
        model=model("dense"),
        runner="v2",
        rounds=[],
        speculative=mtp(DRAFTS, mamba_state_commit="reconstruct"),
        arguments={"worker_extension_cls": "treewy.vllm_plugin.metrics.WorkerExtension"},
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOG_STATS_INTERVAL": "0.5"},
    )
    with serve(run) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options = {"model": run.model, "temperature": 0, "extra_body": {"ignore_eos": True}}
        completed = client.completions.create(prompt=request.prompt, max_tokens=48, **options)
        metrics, scraped, [counted] = server.metrics(), server.scraped(), server.ask("treewy_metrics")
        log = server.log.read_text()
    assert completed.choices[0].text == execute(main(run.model, "reconstruct")).rounds[TEXTS].outputs[0].text
    assert 0 < metrics["spec_decode_num_accepted_tokens_total"] < metrics["spec_decode_num_draft_tokens_total"]
    assert re.search(r"Worker.*treewy: reconstruct, 3 drafts: a request takes 1 block", log)
    assert re.search(r"Worker.*treewy: .* drafts gained \d\.\d\d tokens each, accepted by depth [\d. ]+; ", log)
    # The histogram is the worker's, whose steps the scheduler counted.
    buckets = re.findall(r'^vllm:treewy_accept_length_bucket{.*le="(.*?)".*} (.*)$', scraped, flags=re.M)
    assert [bound for bound, _ in buckets] == ["1.0", "2.0", "3.0", "4.0", "+Inf"]
    assert [float(count) for _, count in buckets[:-1]] == list(accumulate(counted["accept_lengths"]))
    assert metrics["treewy_accept_length_count"] == metrics["spec_decode_num_drafts_total"] == counted["num_drafts"]
    assert metrics["treewy_accept_length_sum"] == counted["num_drafts"] + counted["num_accepted_tokens"]
    depths = re.findall(r'^vllm:treewy_accepted_drafts_total{depth="(\d)".*} (.*)$', scraped, flags=re.M)
    positions = re.findall(r'per_pos_total{.*position="(\d)".*} (.*)$', scraped, flags=re.M)
    assert depths == [(str(int(position) + 1), count) for position, count in positions]
