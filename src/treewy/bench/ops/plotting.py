"""Times over tree sizes, drawn: the data is prepared here, and matplotlib is only asked to draw it."""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from treewy.bench.ops.report import STATES
from treewy.bench.ops.shapes import tree_of
from treewy.errors import BackendError

# Rows whose problems differ in nothing but their trees.
PLOTTED = ("verify", "verify-fp32", "reconstruct", "trees", "single")


class Panel(NamedTuple):
    """One policy, state and batch size: microseconds over rows, by who."""

    title: str
    series: dict[str, list[tuple[int, float]]]


def panels(lines: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """Return what to draw: every time over the rows of its tree, and the floor beside.

    Args:
        lines: Results, JSON-ready.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        if line["row"] not in PLOTTED or line["us"] is None:
            continue
        case, size = line["case"], tree_of(line["case"]["shape"]).num_rows
        title = f"{case['policy']}, {STATES[case['state']]} state, B = {case['batch_size']}"
        series = found.setdefault(title, {})
        series.setdefault(line["name"], {})[size] = line["us"]["median"]
        series.setdefault("floor", {})[size] = line["floor_us"]
    return [Panel(title, {name: sorted(at.items()) for name, at in series.items()}) for title, series in found.items()]


def load_pyplot() -> Any:
    """Return matplotlib's drawing interface.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise BackendError(
            "A plot must have matplotlib; it is not installed.", install="pip install matplotlib"
        ) from error


def plot(pyplot: Any, lines: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Draw the panels side by side into a file, whose suffix says in which format."""
    drawn = panels(lines)
    figure, axes = pyplot.subplots(1, max(1, len(drawn)), figsize=(4 * max(1, len(drawn)), 3.5), squeeze=False)
    for panel, axis in zip(drawn, axes[0], strict=False):
        for name, points in panel.series.items():
            style = "k--" if name == "floor" else "o-"
            axis.plot([x for x, _ in points], [y for _, y in points], style, label=name)
        axis.set(title=panel.title, xlabel="rows", ylabel="us per layer", ylim=(0, None))
        axis.legend()
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)
