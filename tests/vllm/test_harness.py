"""The harness does what it says, and its models are worth drafting for."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from models import CONFIGS

from engine import EngineError, Report, Request, Run, mtp

Model = Callable[..., str]
Execute = Callable[[Run], Report]

PROMPTS = [list(range(10, 40)), [5, 6, 7, 8]]


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_wander_and_some_drafts_are_right(name: str, model: Model, execute: Execute) -> None:
    """Else equal tokens would prove nothing: every family's head guesses some tokens, and texts do not just repeat."""
    requests = [Request(prompt=prompt, sampling={"max_tokens": 80}) for prompt in PROMPTS]
    report = execute(Run(model=model(name), speculative=mtp(3), rounds=[requests]))
    (served,) = report.rounds
    by_depth = served.counters["spec_decode_num_accepted_tokens_per_pos"]
    assert len(by_depth) == 3
    assert served.counters["spec_decode_num_drafts"] > by_depth[0] > by_depth[1] > by_depth[2] >= 0
    assert by_depth[1] >= 5
    assert {1, 2, 3} <= {gain for output in served.outputs for gain in output.gains}
    for tokens in served.tokens:
        assert len(set(pairwise(tokens))) > 40


def test_requests_join_leave_and_come_again(model: Model, execute: Execute) -> None:
    """What `Request` says of engine steps, and that a round leaves nothing behind for the next."""
    steady = Request(prompt=PROMPTS[0], sampling={"max_tokens": 24, "logprobs": 2})
    late = Request(prompt="t5 t6 t7 t8", sampling={"max_tokens": 12}, joins=5)
    aborted = Request(prompt=[9, 9, 3], joins=1, aborts=4)
    run = Run(model=model("dense"), rounds=[[steady, late, aborted], [steady], [steady]])
    first, second, third = execute(run).rounds
    assert [output.reason for output in first.outputs] == ["length", "length", "abort"]
    assert [len(output.tokens) for output in first.outputs] == [24, 12, 3]
    assert first.steps == second.steps == 24
    assert second.outputs == third.outputs
    assert second.outputs[0].gains == [1] * 24
    assert all(token in place for token, place in zip(second.tokens[0], second.outputs[0].logprobs, strict=True))
    assert second.counters["generation_tokens"] == 24
    # The token of the end has no text.
    assert first.outputs[1].text == "".join(f"t{token}" for token in first.tokens[1] if token < 127)


def test_a_synthetic_rate_decides_what_is_accepted(model: Model, execute: Execute) -> None:
    request = Request(prompt=PROMPTS[0], sampling={"max_tokens": 33})
    report = execute(Run(model=model("dense"), runner="v2", speculative=mtp(3, accepted=[1, 1, 0]), rounds=[[request]]))
    assert report.rounds[0].outputs[0].gains == [1] + [3] * 10 + [2]


def test_a_process_that_fails_says_why(model: Model, execute: Execute) -> None:
    run = Run(model=model("dense"), rounds=[], arguments={"max_model_len": -7})
    with pytest.raises(EngineError, match="max_model_len") as caught:
        execute(run)
    assert "exit code: 1" in str(caught.value)


def test_a_plugin_that_does_not_load_is_no_success(model: Model, execute: Execute) -> None:
    """vLLM goes on without it: every test of the plugin would pass, trying nothing."""
    run = Run(model=model("dense"), rounds=[], prepare=["probes:hide_the_plugin"])
    with pytest.raises(EngineError, match="a plugin failed to load"):
        execute(run)
