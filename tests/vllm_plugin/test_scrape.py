"""The histogram of accept lengths: worked out from vLLM's counters, shown where options are, and taken away again."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treewy.vllm_plugin import scrape
from treewy.vllm_plugin.options import Options
from treewy.vllm_plugin.scrape import buckets_of


class Registry:
    """Stands in for prometheus_client's: of counters, and of collectors, which it asks to describe themselves."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.collectors: list[Any] = []

    def register(self, collector: Any) -> None:
        names = [family.name for family in collector.describe()]
        assert names == [scrape.LENGTHS, scrape.DEPTHS]
        assert not self.collectors, "a name twice"
        self.collectors.append(collector)

    def unregister(self, collector: Any) -> None:
        self.collectors.remove(collector)

    def restricted_registry(self, names: list[str]) -> Any:
        chosen = [sample for sample in self.samples if sample.name in names]
        return SimpleNamespace(collect=lambda: [SimpleNamespace(samples=[sample]) for sample in chosen])


class Family:
    """A metric: its name, and what was added."""

    def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
        self.name, self.labels, self.values = name, labels, dict[Any, Any]()

    def add_metric(self, labels: list[str], *value: Any) -> None:
        assert len(labels) == len(self.labels)
        self.values[tuple(labels)] = value


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made, module, core = Registry(), ModuleType("prometheus_client"), ModuleType("prometheus_client.core")
    vars(module).update(REGISTRY=made, core=core)
    vars(core).update(CounterMetricFamily=Family, HistogramMetricFamily=Family)
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", core)
    monkeypatch.setattr(scrape, "_shown", [])
    return made


def count(registry: Registry, steps: list[int], positions: int, **labels: str) -> None:
    """Put vLLM's counters into a registry: of steps that accepted so many drafts, and of something else."""
    registry.samples += [
        SimpleNamespace(name=scrape.DRAFTS, labels=labels, value=float(len(steps))),
        SimpleNamespace(name="vllm:num_preemptions_total", labels=labels, value=7.0),
    ]
    for position in reversed(range(positions)):
        value = float(sum(accepted > position for accepted in steps))
        of_position = labels | {"position": str(position)}
        registry.samples.append(SimpleNamespace(name=scrape.BY_POSITION, labels=of_position, value=value))


STEPS = [0, 3, 1, 0, 0, 2, 1, 0, 3, 0]


def test_buckets() -> None:
    at_least = [sum(accepted >= depth for accepted in STEPS) for depth in (1, 2, 3)]
    gained = [1 + accepted for accepted in STEPS]
    wanted = [(f"{bound}.0", sum(length <= bound for length in gained)) for bound in (1, 2, 3, 4)]
    assert buckets_of(len(STEPS), at_least) == [*wanted, ("+Inf", len(STEPS))]


def test_every_engine_of_its_own(registry: Registry) -> None:
    count(registry, STEPS, 3, model_name="a", engine="0")
    count(registry, [2, 2], 3, model_name="a", engine="1")
    scrape.show(Options("reconstruct"), 3)
    [collector] = registry.collectors
    lengths, depths = collector.collect()
    assert lengths.labels == ["model_name", "engine"]
    assert lengths.values == {
        ("a", "0"): ([("1.0", 5), ("2.0", 7), ("3.0", 8), ("4.0", 10), ("+Inf", 10)], 20),
        ("a", "1"): ([("1.0", 0), ("2.0", 0), ("3.0", 2), ("4.0", 2), ("+Inf", 2)], 6),
    }
    assert depths.labels == ["model_name", "engine", "depth"]
    assert depths.values == {
        ("a", engine, str(depth)): (value,)
        for engine, values in (("0", (5, 3, 2)), ("1", (2, 2, 0)))
        for depth, value in enumerate(values, start=1)
    }


def test_a_tree_has_fewer_depths_than_drafts(registry: Registry) -> None:
    count(registry, [0, 2, 1, 2], 6, model_name="a", engine="0")
    scrape.show(Options("reconstruct", widths=(2, 2)), 6)
    lengths, depths = registry.collectors[0].collect()
    assert lengths.values["a", "0"] == ([("1.0", 1), ("2.0", 2), ("3.0", 4), ("+Inf", 4)], 9)
    assert [labels[-1] for labels in depths.values] == ["1", "2"]


def test_nothing_is_counted(registry: Registry) -> None:
    """vLLM was told to keep no statistics, or has not begun."""
    scrape.show(Options("ring"), 3)
    assert registry.collectors[0].collect() == []


def test_the_engine_that_was_configured_last(registry: Registry) -> None:
    scrape.hide()
    for drafts in (3, 5):
        scrape.show(Options("ring"), drafts)
        assert [collector.max_path for collector in registry.collectors] == [drafts + 1]
    scrape.hide()
    assert registry.collectors == []
