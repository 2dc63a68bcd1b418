"""Without treewy's options vLLM is as it was, bit for bit, with the plugin installed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from engine import Report, Request, Run, mtp

REQUESTS = [
    Request(prompt=list(range(10, 40)), sampling={"max_tokens": 32, "logprobs": 3}),
    Request(prompt=[5, 6, 7, 8], sampling={"max_tokens": 24, "logprobs": 3}, joins=3),
    Request(prompt=[1, 2], sampling={"max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": 3}),
]


@pytest.mark.parametrize("speculative", [None, mtp(3)], ids=["plain", "mtp"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_plugin_alone_changes_no_bit(
    runner: Literal["v1", "v2"],
    speculative: dict[str, Any] | None,
    model: Callable[..., str],
    execute: Callable[[Run], Report],
) -> None:
    """Tokens, log-probabilities, accepted drafts and the blocks of the cache."""
    run = Run(
        model=model("dense"),
        runner=runner,
        speculative=speculative,
        rounds=[REQUESTS],
        probe="probes:surroundings",
    )
    present, absent = execute(run), execute(replace(run, plugin=False))
    assert [report.rounds[0].probed["plugin"] for report in (present, absent)] == [True, False]
    assert present.rounds[0].outputs == absent.rounds[0].outputs
    assert present.rounds[0].counters == absent.rounds[0].counters
    assert present.num_blocks == absent.num_blocks


def test_registering_twice_is_registering_once(model: Callable[..., str], execute: Callable[[Run], Report]) -> None:
    """vLLM calls plugins in each of its processes, and again in some of them."""
    run = Run(model=model("dense"), runner="v2", speculative=mtp(3), rounds=[REQUESTS], probe="probes:surroundings")
    twice = execute(replace(run, prepare=["treewy.vllm_plugin:register", "treewy.vllm_plugin:register"]))
    assert twice.rounds[0].outputs == execute(run).rounds[0].outputs
