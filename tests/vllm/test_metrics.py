"""The histogram of accept lengths beside vLLM's own counters, in the registry that both are scraped from."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

from treewy.vllm_plugin import scrape
from treewy.vllm_plugin.options import Options

ENGINES = {0: ["a model", "0"], 1: ["a model", "1"]}


@pytest.fixture
def shown() -> Iterator[None]:
    """Show the histogram of chains of 3 before vLLM makes its own metrics, as in its front ends."""
    scrape.show(Options("reconstruct"), 3)
    yield
    scrape.hide()
    unregister_vllm_metrics()


def vllms(drafts: int) -> Any:
    """Return vLLM's counters, made anew."""
    unregister_vllm_metrics()
    return SpecDecodingProm(SimpleNamespace(num_speculative_tokens=drafts), ["model_name", "engine"], ENGINES)


def steps_of(counters: Any, drafts: int, engine: int, steps: int = 200) -> list[int]:
    """Let vLLM count steps, as its scheduler and front end do; return what each accepted."""
    draw, accepted = random.Random(engine), []
    for _ in range(steps // 4):
        stats = SpecDecodingStats.new(drafts)
        for _ in range(4):
            accepted.append(draw.choice([0, 0, 1, 1, 1, 2, 3]))
            stats.observe_draft(drafts, accepted[-1])
        counters.observe(stats, engine)
    return accepted


def test_the_histogram_is_that_of_the_steps(shown: None) -> None:
    """For users of `LLM.get_metrics()`, engine by engine."""
    counters = vllms(3)
    accepted = {engine: steps_of(counters, 3, engine) for engine in ENGINES}
    found = [metric for metric in get_metrics_snapshot() if metric.name == scrape.LENGTHS]
    assert [metric.labels for metric in found] == [{"model_name": "a model", "engine": str(x)} for x in ENGINES]
    for metric, steps in zip(found, accepted.values(), strict=True):
        assert (metric.count, metric.sum) == (len(steps), len(steps) + sum(steps))
        bounds = [float(bound) for bound in metric.buckets]
        assert bounds == [1, 2, 3, 4, float("inf")]
        assert list(metric.buckets.values()) == [sum(1 + x <= bound for x in steps) for bound in bounds]
    depths = {
        (metric.labels["engine"], metric.labels["depth"]): metric.value
        for metric in get_metrics_snapshot()
        if metric.name == scrape.DEPTHS
    }
    assert depths == {
        (str(engine), str(depth)): sum(x >= depth for x in steps)
        for engine, steps in accepted.items()
        for depth in (1, 2, 3)
    }


def test_what_is_scraped(shown: None) -> None:
    assert b"treewy" not in generate_latest(REGISTRY)  # vLLM counts nothing yet
    steps_of(vllms(3), 3, 0)
    text = generate_latest(REGISTRY).decode()
    assert "# TYPE vllm:treewy_accept_length histogram\n" in text
    assert "# TYPE vllm:treewy_accepted_drafts_total counter\n" in text
    assert 'vllm:treewy_accept_length_count{engine="0",model_name="a model"} 200.0\n' in text
    scrape.hide()
    assert b"treewy" not in generate_latest(REGISTRY)


def test_another_engine(shown: None) -> None:
    """A tree of two levels and six drafts after chains of three: vLLM has six positions, steps gain three tokens at most."""
    steps_of(vllms(3), 3, 0)
    scrape.show(Options("reconstruct", widths=(2, 2)), 6)
    counters = vllms(6)
    stats = SpecDecodingStats.new(6)
    for accepted in (0, 2, 1, 2):
        stats.observe_draft(6, accepted)
    counters.observe(stats, 0)
    metric = next(metric for metric in get_metrics_snapshot() if metric.name == scrape.LENGTHS)
    assert metric.buckets == {"1.0": 1, "2.0": 2, "3.0": 4, "+Inf": 4}
    assert metric.sum == 9
