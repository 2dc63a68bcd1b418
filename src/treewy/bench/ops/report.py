"""Results as a table for people."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = ("row", "problem", "who", "us (range)", "MiB/seq", "% floor", "x", "of", "bar")
LEFT = 3
STAGE_COLUMNS = ("problem", "state", "gram", "solve", "output", "whole", "binds")
STATES = {"bfloat16": "bf16", "float32": "fp32"}


def table_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of every result line; a line with several bars takes several rows.

    Args:
        lines: Results, JSON-ready.
    """
    rows = []
    for line in lines:
        if _is_staged(line):
            continue
        first = [line["row"], problem_of(line["case"]), line["name"], _figure(line), _memory(line["bytes_per_seq"])]
        first.append(_share(line["share_of_floor"]))
        compared = _comparisons(line)
        rows.append([*first, *compared[0]])
        rows += [[""] * len(first) + more for more in compared[1:]]
    return rows


def stage_rows(lines: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return, for every problem that was timed by stages, the time of the first and what each further one adds, in us.

    A kernel that cannot be cut up at some size has its whole time alone, and the reason instead of what binds.
    """
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if _is_staged(line):
            problems.setdefault(problem_of(line["case"]), []).append(line)
    return [[problem, *_stages(timed)] for problem, timed in problems.items()]


def _stages(timed: Sequence[Mapping[str, Any]]) -> list[str]:
    medians = [line["us"]["median"] for line in timed]
    whole = f"{medians[-1]:.1f}"
    if len(timed) == 1:
        return ["", "", "", "", whole, timed[0]["note"]]
    added = [f"{later - before:.1f}" for before, later in itertools.pairwise(medians)]
    binds = [line["name"].rpartition("+")[2] for line in timed if (line["note"] or "").endswith("binds")]
    return [f"{medians[0]:.1f}", *added, whole, ", ".join(binds)]


def _is_staged(line: Mapping[str, Any]) -> bool:
    return line["row"] == "stages" and line["us"] is not None


def problem_of(case: Mapping[str, Any]) -> str:
    """Return what was done in few letters: `ring chain4 B32 bf16`."""
    parts = [case.get("policy"), case.get("shape"), case.get("keys")]
    if "batch_size" in case:
        parts.append(f"B{case['batch_size']}")
    return " ".join(part for part in (*parts, STATES.get(case.get("state", ""))) if part)


def title_of(header: Mapping[str, Any]) -> str:
    """Return where and with what a run was made."""
    where = header["environment"]
    return (
        f"{where['device']}, {header['backend']} kernels, copies at {header['copy_gb_per_s']:.0f} GB/s; medians of "
        f"{header['num_replays']} replays, cold L2"
    )


def print_table(header: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, and below it why lines have no time."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = title_of(header)
    kinds = ((COLUMNS, LEFT, ("of", "bar"), table_rows(lines)), (STAGE_COLUMNS, 1, ("binds",), stage_rows(lines)))
    for columns, num_left, left, rows in kinds:
        if not rows and columns is STAGE_COLUMNS:
            continue
        table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place < num_left or column in left else "right", no_wrap=True)
        for cells in rows:
            table.add_row(*cells)
        # As wide as its figures whatever the window: a number that is cut off is another number.
        console = Console(highlight=False, width=Console(width=1000).measure(table).maximum)
        console.print(table)
        title = "Stages of a launch, microseconds: the state's products, and what each further stage adds"
    console = Console(highlight=False)
    for note in notes(lines):
        console.print(note, soft_wrap=True, markup=False)


def notes(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what lines say beside their figures, each once; of stages, the table says it."""
    said = (line for line in lines if line["note"] and not _is_staged(line))
    return list(dict.fromkeys(f"{line['row']}, {line['name']}: {_remark(line)}" for line in said))


def _remark(line: Mapping[str, Any]) -> str:
    return f"not measured: {line['note']}" if line["is_fault"] else line["note"]


def _figure(line: Mapping[str, Any]) -> str:
    if line["us"] is not None:
        spread = line["us"]
        return f"{spread['median']:.1f} ({spread['low']:.1f}-{spread['high']:.1f})"
    return "" if line["error"] is None else f"{line['error']:.1e}"


def _memory(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"


def _comparisons(line: Mapping[str, Any]) -> list[list[str]]:
    """Return [x, of, bar] of every bar; without bars, of what else was timed beside."""
    if line["bars"]:
        return [_judged(bar) for bar in line["bars"]]
    if line["name"].startswith("treewy") and line["times"]:
        return [[f"{value:.2f}", name, ""] for name, value in line["times"].items()]
    return [["", "", ""]]


def _judged(bar: Mapping[str, Any]) -> list[str]:
    if bar["against"] == "floor":
        return ["", "", f">= {100 * bar['limit']:.0f} %: {bar['verdict']}"]
    value = "" if bar["value"] is None else f"{bar['value']:.2g}" if bar["value"] < 0.01 else f"{bar['value']:.2f}"
    return [value, bar["against"], f"<= {bar['limit']:g}: {bar['verdict']}"]
