"""Real vLLM on GPUs, in whole captured graphs: texts are those without drafts, and states are what the recurrence says.

The model's layers are those of Qwen3.5-35B-A3B, and their weights move the logits as trained ones do. Figures are printed:
`pytest -rP` shows them.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import pytest
import torch
from chains import (
    AGAIN,
    ASKED,
    LOGPROBS,
    RESET,
    TALK,
    assert_alike,
    assert_close,
    compare,
    conversation,
    differences,
    drafting,
    first_token,
    greedy,
    prompt,
)
from trees import growing

from engine import EngineError, Output, Report, Request, Run, mtp
from tolerances import (
    VLLM_LOGPROB,
    VLLM_LOGPROB_OF_MOST,
    VLLM_LOGPROB_OF_STOCK,
    VLLM_NEAR_TIE,
    VLLM_STATE,
    VLLM_WALK,
)

pytestmark = pytest.mark.gpu

Model = Callable[..., str]
Execute = Callable[[Run], Report]

TEXTS = [greedy(prompt(300 + i, length), 64, joins=2 * i) for i, length in enumerate((30, 5, 170, 2, 600, 90, 12, 45))]
# Prompts of as many tokens as a chain or a tree has rows, while others decode. vLLM 0.26 itself fails them.
ALIKE = [greedy(prompt(330 + i, length), 64, joins=4 * i) for i, length in enumerate((30, 4, 15, 40))]
# The second time in memory that is not a number.
ROUNDS = [TEXTS, TEXTS, ALIKE]
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "language_model_only": True,
    "additional_config": {"gdn_prefill_backend": "triton"},
    "max_model_len": 1024,
    "max_num_seqs": len(TEXTS),
    # Of the whole GPU; several engines run beside each other.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 4 * 2**30,
}
BINARY, TERNARY = (2, 2, 2), (3, 3, 3)


def graphs(run: Run) -> dict[str, Any]:
    """Return arguments that capture whole steps, of few sizes, and compile nothing: both take minutes."""
    rows = 1 + (run.speculative or {"num_speculative_tokens": 0})["num_speculative_tokens"]
    sizes = [count * rows for count in range(1, 1 + len(TEXTS))]
    whole = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "compilation_config": whole}


def captured(run: Run, *, arguments: dict[str, Any] | None = None, **options: Any) -> Run:
    """Return an engine that serves the rounds, without the check, which whole graphs have no room for."""
    speculative = run.speculative and {key: value for key, value in run.speculative.items() if key != "check_every"}
    probe = {} if speculative is None or "mamba_state_commit" not in speculative else {"probe": "probes:wiped"}
    whole = {
        "speculative": speculative,
        "rounds": ROUNDS,
        "gpus": 1,
        "arguments": ARGUMENTS | (arguments or graphs(run)),
    }
    return replace(run, **{"probe": None} | probe | whole | options)


def undrafted(folder: str) -> Run:
    return captured(Run(model=folder, runner="v2", rounds=[]))


def compiled(run: Run) -> Run:
    """Return an engine as vLLM starts it if nobody says anything."""
    return captured(run, arguments={"enforce_eager": False})


def over_two(run: Run) -> Run:
    """Return an engine over two GPUs, which exchange by NCCL alone."""
    return captured(run, gpus=2, arguments=graphs(run) | {"tensor_parallel_size": 2, "disable_custom_all_reduce": True})


ENGINES: dict[str, Callable[[str], Run]] = {
    "store_all": lambda folder: captured(drafting(folder, "store_all"), rounds=ROUNDS[:2]),
    "reconstruct": lambda folder: captured(drafting(folder, "reconstruct")),
    "ring": lambda folder: captured(drafting(folder, "ring")),
    "reconstruct, first runner": lambda folder: captured(drafting(folder, "reconstruct"), runner="v1"),
    "reconstruct, compiled": lambda folder: compiled(drafting(folder, "reconstruct")),
    "tree 2,2,2": lambda folder: captured(growing(folder, "reconstruct", BINARY)),
    "tree 2,2,2, compiled": lambda folder: compiled(growing(folder, "reconstruct", BINARY)),
    "tree 3,3,3, ring": lambda folder: captured(growing(folder, "ring", TERNARY)),
    "reconstruct, two GPUs": lambda folder: over_two(drafting(folder, "reconstruct")),
    "tree 2,2,2, two GPUs": lambda folder: over_two(growing(folder, "reconstruct", BINARY)),
}


def runs(folder: str) -> dict[str, Run]:
    """Return the engines that this machine has GPUs for."""
    made = {name: make(folder) for name, make in ENGINES.items()}
    return {name: run for name, run in made.items() if run.gpus <= torch.cuda.device_count()}


@pytest.fixture(scope="session")
def folder(model: Model) -> str:
    """The model; its states remember hundreds of tokens."""
    return model("gpu", remembers=6.0)


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest, folder: str) -> str:
    if request.param not in runs(folder):
        pytest.skip("needs two CUDA devices")
    return request.param


def test_texts_are_those_without_drafts(name: str, folder: str, execute: Execute) -> None:
    """Up to the first near-tie, of which there are many; what comes behind it is for the next test."""
    report, judge = execute(runs(folder)[name]), execute(undrafted(folder))
    for expected, served in zip(judge.rounds, report.rounds, strict=False):
        likenesses = [compare(*pair) for pair in zip(expected.outputs, served.outputs, strict=True)]
        print(name, *likenesses, sep="\n")
        assert max(likeness.gap for likeness in likenesses) <= VLLM_NEAR_TIE
        assert max(likeness.off for likeness in likenesses) <= VLLM_LOGPROB


def test_log_probabilities_are_those_of_the_same_texts_undrafted(name: str, folder: str, execute: Execute) -> None:
    """Teacher-forced: of every token that any engine said, by one that neither drafts nor has said them.

    As close to it as vLLM is with its own drafts.
    """
    said = {}
    for one, run in runs(folder).items():
        with suppress(EngineError):  # another's failure is for its own tests
            said[one] = spoken(run, execute(run))
    assert {name, "store_all"} <= said.keys()
    expected = judged(said, folder, execute)
    got = {one: list(chain(*(output.logprobs for _, output in pairs))) for one, pairs in said.items()}
    ours, stock = (differences(expected[one], got[one]) for one in (name, "store_all"))
    print(f"{name}: mean {fmean(ours):.4f}, largest {ours[-1]:.3f}, of {len(ours)}; store_all {fmean(stock):.4f}")
    assert fmean(stock) <= VLLM_LOGPROB_OF_MOST
    assert_close(expected[name], got[name], average=VLLM_LOGPROB_OF_STOCK * fmean(stock))


Said = list[tuple[Request, Output]]


def judged(said: dict[str, Said], folder: str, execute: Execute) -> dict[str, list[dict[int, float]]]:
    """Return the log-probabilities of all that each engine said, from one that reads it."""
    texts = [ids.prompt + got.tokens for pairs in said.values() for ids, got in pairs]
    read = [Request(prompt=text, sampling={"max_tokens": 1, "prompt_logprobs": LOGPROBS}) for text in texts]
    (served,) = execute(replace(undrafted(folder), rounds=[read])).rounds
    outputs = iter(served.outputs)
    places = {
        one: [next(outputs).prompt_logprobs[len(ids.prompt) - 1 :] for ids, _ in pairs] for one, pairs in said.items()
    }
    return {one: list(chain(*those)) for one, those in places.items()}


def spoken(run: Run, report: Report) -> Said:
    """Return all requests of an engine, and what it said."""
    rounds = zip(run.rounds, report.rounds, strict=True)
    return [pair for asked, served in rounds for pair in zip(asked, served.outputs, strict=True)]


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "store_all"], indirect=True)
def test_steps_that_only_decode_are_whole_graphs(name: str, folder: str, execute: Execute) -> None:
    """Steps in which a prompt joins are none; and a step gains what vLLM's own does, or more where it verifies a tree."""
    counted = execute(runs(folder)[name]).rounds[-1].probed["counted"]
    stock = [served.counters for served in execute(runs(folder)["store_all"]).rounds]
    gained = counted["num_accepted_tokens"] / counted["num_drafts"]
    gained_by_stock = total(stock, "spec_decode_num_accepted_tokens") / total(stock, "spec_decode_num_drafts")
    print(name, f"{gained:.3f} a draft, store_all {gained_by_stock:.3f}", counted)
    assert counted["num_steps"] > 40
    assert counted["num_full_graph_steps"] >= counted["num_steps"] - sum(map(len, ROUNDS))
    assert gained > (1.3 if "tree" in name else 0.9) * gained_by_stock


def total(counters: list[dict[str, Any]], name: str) -> float:
    return sum(counted[name] for counted in counters)


CHECKED: dict[str, Callable[[str], Run]] = {
    "reconstruct": lambda folder: drafting(folder, "reconstruct"),
    "ring": lambda folder: drafting(folder, "ring"),
    "tree 2,2,2": lambda folder: growing(folder, "reconstruct", BINARY),
    "tree 3,3,3, ring": lambda folder: growing(folder, "ring", TERNARY),
}


@pytest.mark.parametrize("name", CHECKED)
def test_states_are_what_the_recurrence_says(name: str, folder: str, execute: Execute) -> None:
    """Every state that a step reads, against the walk over all accepted rows since the request's prompt."""
    run = replace(CHECKED[name](folder), rounds=ROUNDS, gpus=1, arguments=ARGUMENTS)
    report = execute(replace(run, probe="probes:wiped"))
    for served in report.rounds:
        print(name, served.probed["num_checks"], served.probed["largest"])
        assert served.probed["num_checks"] > 300
        assert 0 < served.probed["largest"] <= VLLM_WALK
        assert all(math.isfinite(x) for output in served.outputs for place in output.logprobs for x in place.values())


# Tokens of a block, and of a conversation with a whole path a step: past the end of the third block, of which the last is
# read again. The second ends with a path, or behind its first row.
TALKS = {"chain": 1072, "tree": 1168}
GAIN = 4


def talk(folder: str, kind: str) -> Run:
    """What was said is asked about twice, and again when it is forgotten."""
    block = TALKS[kind]
    num_steps = block // GAIN + 8
    said = conversation((2 * block - 12, 2 * block - 9), 1 + GAIN * num_steps, 16, block)
    del said["arguments"]["prefix_cache_retention_interval"]
    # The first prompts fit one step: 0.26 cuts those under two blocks anywhere, and its kernels round each piece by itself.
    said["arguments"]["max_num_batched_tokens"] = 4 * block
    accepted = [1.0] * (GAIN - 1)
    run = (
        drafting(folder, "ring", accepted=accepted)
        if kind == "chain"
        else growing(folder, "reconstruct", BINARY, accepted=accepted)
    )
    arguments = ARGUMENTS | said["arguments"]
    return replace(run, **said | {"arguments": arguments, "gpus": 1, "probe": "probes:boundaries"})


@pytest.mark.parametrize("kind", TALKS)
def test_a_conversation_finds_what_was_decoded(kind: str, folder: str, execute: Execute) -> None:
    """From the end of the second block, in states that are those of a prompt of the same tokens."""
    rounds = execute(talk(folder, kind)).rounds
    hits, found = [[output.cached for output in served.outputs] for served in rounds], 2 * TALKS[kind]
    off = rounds[RESET].probed["boundaries"]
    print(kind, hits, off, [served.probed["largest"] for served in rounds])
    assert hits == [[0, 0], [found, found], [found, found], [0, 0]]
    assert {gain for output in rounds[TALK].outputs for gain in output.gains} == {1, GAIN}
    for served in rounds:
        assert served.probed["num_checks"] > 10
        assert served.probed["largest"] <= VLLM_WALK
    assert 0 < max(off) <= VLLM_STATE
    for number in (ASKED, AGAIN):
        assert_alike(*([first_token(output) for output in rounds[one].outputs] for one in (RESET, number)))


@pytest.mark.parametrize("speculative", [None, mtp(3)], ids=["plain", "mtp"])
def test_the_plugin_alone_changes_no_bit(speculative: dict[str, Any] | None, folder: str, execute: Execute) -> None:
    """Without its options: tokens and log-probabilities are those of vLLM without it."""
    run = captured(Run(model=folder, runner="v2", rounds=[], speculative=speculative), rounds=ROUNDS[:2])
    present, absent = execute(run), execute(replace(run, plugin=False))
    assert present.num_blocks == absent.num_blocks
    for ours, theirs in zip(present.rounds, absent.rounds, strict=True):
        assert ours.outputs == theirs.outputs
