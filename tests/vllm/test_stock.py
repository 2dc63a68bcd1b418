"""Without treewy's options vLLM is as it was, bit for bit, with the plugin installed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from engine import Report, Request, Run, mtp

GREEDY = [
    Request(prompt=list(range(10, 40)), sampling={"max_tokens": 32, "logprobs": 3}),
    Request(prompt=[5, 6, 7, 8], sampling={"max_tokens": 24, "logprobs": 3}, joins=3),
]
SAMPLED = [
    Request(prompt=[1, 2], sampling={"max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": 3}),
    Request(prompt=[3, 4], sampling={"max_tokens": 16, "temperature": 1.0, "seed": 6, "logprobs": 3}),
]

DRAFTS = [None, mtp(3)]

Model = Callable[..., str]
Execute = Callable[[Run], Report]


def describe(folder: str, runner: Literal["v1", "v2"], speculative: dict[str, Any] | None) -> Run:
    rounds = [GREEDY, SAMPLED, GREEDY + SAMPLED]
    if runner == "v1" and speculative:
        # The first runner's CPU sampler of drafts draws tokens that differ from run to run, also for greedy requests
        # beside sampled ones.
        rounds = [GREEDY]
    return Run(model=folder, runner=runner, speculative=speculative, rounds=rounds, probe="probes:surroundings")


@pytest.mark.parametrize("speculative", DRAFTS, ids=["plain", "mtp"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_plugin_alone_changes_no_bit(
    runner: Literal["v1", "v2"], speculative: dict[str, Any] | None, model: Model, execute: Execute
) -> None:
    """Tokens, log-probabilities, accepted drafts and the blocks of the cache."""
    run = describe(model("dense"), runner, speculative)
    present, absent = execute(run), execute(replace(run, plugin=False))
    assert [report.rounds[0].probed["plugin"] for report in (present, absent)] == [True, False]
    assert present.num_blocks == absent.num_blocks
    for ours, theirs in zip(present.rounds, absent.rounds, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.counters == theirs.counters


def test_registering_twice_is_registering_once(model: Model, execute: Execute) -> None:
    """vLLM calls plugins in each of its processes, and again in some of them."""
    run = describe(model("dense"), "v2", mtp(3))
    twice = execute(replace(run, prepare=["treewy.vllm_plugin:register", "treewy.vllm_plugin:register"]))
    assert [served.outputs for served in twice.rounds] == [served.outputs for served in execute(run).rounds]


def test_a_run_is_what_it_was_asked_to_be(model: Model, execute: Execute) -> None:
    """The second runner with its kernels in the interpreter, not the first one; treewy's annotations and warnings strict."""
    first, second = (execute(describe(model("dense"), runner, None)) for runner in ("v1", "v2"))
    assert [len(report.lines("Using V2 Model Runner")) for report in (first, second)] == [0, 1]
    assert first.runner == "vllm.v1.worker.cpu_model_runner"
    assert second.runner == "vllm.v1.worker.cpu.model_runner"
    assert second.rounds[0].probed["kernels"] == "triton.runtime.interpreter.InterpretedFunction"
    assert second.rounds[0].probed["annotated"] == "TypeCheckError"
    assert second.rounds[0].probed["warned"] == "UserWarning"
    assert first.rounds[0].tokens == second.rounds[0].tokens
