"""The histogram of accept lengths among vLLM's own metrics, where these are scraped: in the front end.

vLLM's scheduler counts how often each position's draft was accepted. How many steps gained k tokens follows from that, so
it is worked out when somebody asks, and costs the engine nothing. Accepted paths of trees reach the scheduler as lists, so
that positions are depths.

Names begin with vLLM's prefix: `LLM.get_metrics()` shows no others.
"""

# vLLM brings it; where types are checked there is none.
# pyright: reportMissingImports=false
from collections.abc import Sequence
from typing import Any

from treewy.vllm_plugin.options import Options

LENGTHS, DEPTHS = "vllm:treewy_accept_length", "vllm:treewy_accepted_drafts"
# Samples of vLLM's counters: steps of requests that had drafts, and of these by position those that accepted it.
DRAFTS, BY_POSITION = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
POSITION = "position"


class AcceptLengths:
    """A collector for the registry of prometheus_client that has vLLM's counters; where it has none this shows nothing.

    Args:
        registry: The registry.
        max_path: Tokens that one step may gain.
    """

    def __init__(self, registry: Any, max_path: int) -> None:
        """Show nothing yet; see `show`."""
        self.registry, self.max_path = registry, max_path

    def describe(self) -> list[Any]:
        """Return the metrics without values: the registry asks for their names."""
        return self._families([])

    def collect(self) -> list[Any]:
        """Return the metrics, with the labels of vLLM's."""
        drafts, by_position = self._read()
        if not drafts:
            return []
        lengths, depths = families = self._families([name for name, _ in next(iter(drafts))])
        for labels, count in drafts.items():
            values = [value for _, value in labels]
            accepted = [by_position[labels].get(position, 0.0) for position in range(self.max_path - 1)]
            lengths.add_metric(values, buckets_of(count, accepted), count + sum(accepted))
            for depth, of_depth in enumerate(accepted, start=1):
                depths.add_metric([*values, str(depth)], of_depth)
        return families

    def _families(self, labels: list[str]) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        gained = "Tokens that a step gained a request that had drafts: those accepted, and one."
        return [
            HistogramMetricFamily(LENGTHS, gained, labels=labels),
            CounterMetricFamily(DEPTHS, "Accepted drafts by depth, 1 for the first.", labels=[*labels, "depth"]),
        ]

    def _read(self) -> tuple[dict[Any, float], dict[Any, dict[int, float]]]:
        """Return what vLLM counted, by the names and values of its labels: drafts, and acceptances by position."""
        drafts: dict[Any, float] = {}
        by_position: dict[Any, dict[int, float]] = {}
        for metric in self.registry.restricted_registry([DRAFTS, BY_POSITION]).collect():
            for sample in metric.samples:
                labels = tuple(pair for pair in sample.labels.items() if pair[0] != POSITION)
                if sample.name == DRAFTS:
                    drafts[labels] = sample.value
                else:
                    by_position.setdefault(labels, {})[int(sample.labels[POSITION])] = sample.value
        return drafts, by_position


def buckets_of(drafts: float, accepted: Sequence[float]) -> list[tuple[str, float]]:
    """Return a histogram of tokens gained per step, cumulative as Prometheus has it.

    Args:
        drafts: Steps in all.
        accepted: Steps that accepted at least 1, 2, ... drafts.
    """
    # A step gained at most k tokens if it did not accept k drafts.
    below = [(f"{tokens}.0", drafts - count) for tokens, count in enumerate(accepted, start=1)]
    return [*below, (f"{len(accepted) + 1}.0", drafts), ("+Inf", drafts)]


# What this process shows: of the engine that was configured last, as vLLM's own metrics are.
_shown: list[tuple[Any, AcceptLengths]] = []


def show(options: Options, drafts: int) -> None:
    """Add the histogram to the metrics of this process.

    Args:
        options: The engine's.
        drafts: Tokens that are drafted per step.
    """
    from prometheus_client import REGISTRY

    hide()
    collector = AcceptLengths(REGISTRY, options.longest_path(drafts))
    REGISTRY.register(collector)
    _shown.append((REGISTRY, collector))


def hide() -> None:
    """Take it away again, if it is there: an engine is being configured that asks for nothing."""
    while _shown:
        registry, collector = _shown.pop()
        registry.unregister(collector)
