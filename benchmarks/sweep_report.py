"""docs/sweep.md's tables, from the rows of vllm_sweep.py."""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vllm_model import shape

# The engines that others are held against: vLLM's snapshots, and vLLM without drafts.
SNAPSHOTS, PLAIN = "store_all", "none"
# A point is memory-bound where vLLM's snapshots reach this share of the blocks, in percent, preempt a request, or keep requests
# waiting after this share of the steps although more might run.
FULL, QUEUED = 99.0, 0.1
# A p99 of times to first token is taken for what it is if nobody has waited more than so many times longer when the window ends.
PATIENCE = 1.25
REGIMES = ("memory-bound", "ample", "no snapshots to compare with")
COLUMNS = (
    "utilisation",
    "load",
    "commit",
    "runs",
    "tokens/s",
    "x snapshots",
    "x no drafts",
    "TTFT p50 / p99, ms",
    "p99 x sooner",
    "TPOT p50 / p99, ms",
    "p50 x faster",
    "peak KV",
    "running / waiting",
    "preemptions",
    "tokens a step",
)
SUMMARY = ("engine", "points", "tokens/s", "p99 TTFT, x sooner", "TPOT, x faster")
# The paper's own figures over vLLM's snapshots (arXiv 2608.20961, section 5).
PAPER = {
    "memory-bound": ("the paper, 35B, one B200", "31 of 105", "1.15", "2.94", "0.83"),
    "ample": ("the paper, 35B, one B200", "74 of 105", "within some percent", "within some percent", "0.97 to 0.99"),
}


class Setting(NamedTuple):
    """What must be the same for rows to be compared."""

    model: str
    mix: str
    state_dtype: str
    max_model_len: int
    device: str
    vllm: str

    @property
    def slug(self) -> str:
        name, _, manner = self.model.lower().partition(" layers")
        words = (name.split()[0], *manner.replace(",", "").split(), self.mix, self.state_dtype, self.max_model_len)
        return "-".join(map(str, ("sweep", *words)))


class Where(NamedTuple):
    """A point: of which share of the memory, and under which load."""

    utilisation: float
    arrivals: str
    level: float

    @property
    def load(self) -> str:
        return f"{self.level:g} at once" if self.arrivals == "closed" else f"{self.level:g} a second"


class Figure(NamedTuple):
    """Medians of one engine at one point; a time may be the least that it can be."""

    runs: int
    tokens_per_s: float
    ttft: tuple[float | None, float]
    ttft_at_least: bool
    tpot: tuple[float | None, float | None]
    peak_kv: float
    running: int
    waiting: int
    preemptions: float
    accepted: float | None
    bound: bool


Figures = dict[Where, dict[str, Figure]]


def read(folder: Path) -> tuple[dict[Setting, Figures], dict[Setting, list[dict[str, Any]]]]:
    """Return the figures of all result files by setting, and the environments that they come from."""
    rows: dict[Setting, dict[tuple[Where, str], list[dict[str, Any]]]] = {}
    environments: dict[Setting, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("sweep*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if "benchmark" in line:
                setting = _setting(line)
                environments.setdefault(setting, []).append(line["environment"])
            elif line["row"] == "point":
                where = Where(line["utilisation"], line["arrivals"], line.get("concurrency", line.get("rate")))
                rows.setdefault(setting, {}).setdefault((where, _commit(line)), []).append(line)
    figures: dict[Setting, Figures] = {}
    for setting, found in rows.items():
        for where, commit in sorted(found):
            figures.setdefault(setting, {}).setdefault(where, {})[commit] = _figure(found[where, commit])
    return figures, environments


def _setting(header: dict[str, Any]) -> Setting:
    given, environment = header["options"], header["environment"]
    names = given["mix"], given["state_dtype"], given["max_model_len"]
    return Setting(shape(given), *names, environment["device"], environment["versions"]["vllm"])


def _commit(row: dict[str, Any]) -> str:
    return row["commit"] if row["widths"] is None else f"{row['commit']} {','.join(map(str, row['widths']))}"


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    # Who still waits has waited so long already, and nobody knows how long it will.
    cut = [x["ttft_ms"]["p99"] is None or x["oldest_waiting_ms"] > PATIENCE * x["ttft_ms"]["p99"] for x in rows]
    longest = [max(x["ttft_ms"]["p99"] or 0.0, x["oldest_waiting_ms"]) for x in rows]
    return Figure(
        runs=len(rows),
        tokens_per_s=median(x["output_tokens_per_s"] for x in rows),
        ttft=(middle(x["ttft_ms"]["p50"] for x in rows), median(longest)),
        ttft_at_least=any(cut),
        tpot=(middle(x["tpot_ms"]["p50"] for x in rows), middle(x["tpot_ms"]["p99"] for x in rows)),
        peak_kv=max(x["peak_kv_percent"] for x in rows),
        running=max(x["peak_running"] for x in rows),
        waiting=max(x["peak_waiting"] for x in rows),
        preemptions=median(x["preemptions"] for x in rows),
        accepted=middle(x["accepted_per_step"] for x in rows),
        bound=any(x["peak_kv_percent"] >= FULL or x["preemptions"] or x["queued_share"] >= QUEUED for x in rows),
    )


def regime(engines: dict[str, Figure]) -> str:
    """Return in which of `REGIMES` a point is."""
    if SNAPSHOTS not in engines:
        return REGIMES[2]
    return REGIMES[0] if engines[SNAPSHOTS].bound else REGIMES[1]


class Ratio(NamedTuple):
    """How many times better than another engine; or at least so many times."""

    value: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'at least ' if self.at_least else ''}{self.value:.2f}"


def sooner(own: Figure, other: Figure) -> Ratio | None:
    """Return how many times sooner the first token comes at the 99th percentile; None if that of its own is not known."""
    return None if own.ttft_at_least else Ratio(other.ttft[1] / own.ttft[1], other.ttft_at_least)


def faster(own: Figure, other: Figure) -> Ratio | None:
    """Return how many times less a token takes, at the median of requests."""
    if own.tpot[0] is None or other.tpot[0] is None:
        return None
    return Ratio(other.tpot[0] / own.tpot[0])


def mean(ratios: Iterable[Ratio | None]) -> str:
    """Return the geometric mean of those that are known."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return ""
    return str(Ratio(prod(x.value for x in known) ** (1 / len(known)), any(x.at_least for x in known)))


def section(results: Path, docs: Path) -> str:
    """Return what stands between the marks of docs/sweep.md."""
    figures, environments = read(results)
    if not figures:
        return "\nThere are no results yet.\n\n"
    return "".join(_setting_section(setting, figures[setting], environments[setting], docs) for setting in figures)


def _setting_section(setting: Setting, figures: Figures, environments: list[dict[str, Any]], docs: Path) -> str:
    title = (
        f"\n### {setting.device}, vLLM {setting.vllm}, {setting.state_dtype} states\n\n{setting.model}, dummy weights, "
        f"lengths `{setting.mix}`, contexts of up to {setting.max_model_len:,} tokens.\n\n"
    )
    parts = [title, _summary(figures)]
    for name in REGIMES:
        points = {where: engines for where, engines in figures.items() if regime(engines) == name}
        if points:
            rows = [_cells(where, engines, commit) for where, engines in points.items() for commit in engines]
            parts.append(f"#### {name.capitalize()}\n\n{_markdown(COLUMNS, rows)}\n")
    pictures = [path.name for path in sorted(docs.glob(f"{setting.slug}-*.svg"))]
    parts += [f"![Tokens a second and p99 TTFT over the load]({name})\n\n" for name in pictures]
    commands = dict.fromkeys(f"`{' '.join(x['argv'])}` at {x['sha'][:8]}" for x in environments)
    parts.append("Processes:\n\n" + "".join(f"- {command}\n" for command in commands) + "\n")
    return "".join(parts)


def _summary(figures: Figures) -> str:
    rows: list[Sequence[str]] = []
    compared = {where: engines for where, engines in figures.items() if SNAPSHOTS in engines}
    for name in REGIMES[:2]:
        rows.append((f"{name}: {PAPER[name][0]}", *PAPER[name][1:]))
        for commit in dict.fromkeys(x for engines in compared.values() for x in engines if x != SNAPSHOTS):
            having = [engines for engines in compared.values() if commit in engines]
            pairs = [(x[commit], x[SNAPSHOTS]) for x in having if regime(x) == name]
            if pairs:
                speed = mean(Ratio(own.tokens_per_s / other.tokens_per_s) for own, other in pairs)
                first, each = mean(sooner(*pair) for pair in pairs), mean(faster(*pair) for pair in pairs)
                rows.append((f"{name}: {commit}", f"{len(pairs)} of {len(having)}", speed, first, each))
    return _markdown(SUMMARY, rows) + "\n"


def _cells(where: Where, engines: dict[str, Figure], commit: str) -> list[str]:
    own, snapshots, plain = engines[commit], engines.get(SNAPSHOTS), engines.get(PLAIN)
    over = ["" if x is None or x is own else f"{own.tokens_per_s / x.tokens_per_s:.2f}" for x in (snapshots, plain)]
    compared = snapshots is not None and snapshots is not own
    first, each = (sooner(own, snapshots), faster(own, snapshots)) if compared else (None, None)
    p99 = f"{'at least ' if own.ttft_at_least else ''}{own.ttft[1]:,.0f}"
    return [
        f"{where.utilisation:g}",
        where.load,
        commit,
        str(own.runs),
        f"{own.tokens_per_s:,.0f}",
        *over,
        f"{_number(own.ttft[0], ',.0f')} / {p99}",
        "" if first is None else str(first),
        f"{_number(own.tpot[0], '.1f')} / {_number(own.tpot[1], '.1f')}",
        "" if each is None else str(each),
        f"{own.peak_kv:.0f} %",
        f"{own.running} / {own.waiting}",
        f"{own.preemptions:.0f}",
        _number(own.accepted, ".2f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
