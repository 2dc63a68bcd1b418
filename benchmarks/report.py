"""Write the tables of README.md and docs/sweep.md from benchmarks/results: python benchmarks/report.py [--check] [--plots]."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import sweep_plots
import sweep_report
import vllm_model
import vllm_pairs

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: written by benchmarks/report.py -->\n", "<!-- end of results -->"
MIN_PROMPTS = 10
HEADER = (
    "| decoding | commit | tokens a step (prose / code) | distinct 4-grams | by depth | not first siblings "
    "| tokens/s | state MiB | differences |\n|---|---|---|---|---|---|---|---|---|\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")
    parser.add_argument("--plots", action="store_true", help="draw docs/sweep-*.svg before; needs matplotlib")
    options = parser.parse_args()
    results, docs = ROOT / "benchmarks" / "results", ROOT / "docs"
    if options.plots:
        from treewy.bench.ops.plotting import load_pyplot
        from treewy.errors import BackendError

        try:
            sweep_plots.draw(load_pyplot(), results, docs)
        except BackendError as error:
            sys.exit(str(error))
    stale = []
    for page, content in ((ROOT / "README.md", tables()), (docs / "sweep.md", sweep_report.section(results, docs))):
        before = page.read_text()
        head, rest = before.split(BEGIN)
        after = head + BEGIN + content + END + rest.split(END)[1]
        if after != before:
            stale.append(page.name)
            if not options.check:
                page.write_text(after)
    if options.check and stale:
        sys.exit(f"Not what benchmarks/report.py writes: {', '.join(stale)}; run it.")


def tables() -> str:
    """Return the tables of the held-out result files that cover enough prompts to read anything from."""
    heldout = "".join(_table(rows) for rows in _results("heldout*") if rows[0]["num_prompts"] >= MIN_PROMPTS)
    sampled = "".join(map(_sampled_table, _results("sampled")))
    engine = "".join(_engine_table(report) for (report,) in _results("engine*"))
    ops = "".join(_ops_table(first, lines) for first, *lines in _results("ops*"))
    return (
        heldout
        + sampled
        + engine
        + ops
        + "".join(_attention_table(first, lines) for first, *lines in _results("attention*"))
        + _vllm_table(_results("vllm*"))
        + "".join(map(_pairs_table, _results("pairs*")))
    )


def _results(pattern: str) -> list[list[dict[str, Any]]]:
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{pattern}.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def _command(environment: dict[str, Any]) -> str:
    program, *arguments = environment["argv"]
    if program == "__main__.py":
        program = "treewy"
    elif program.endswith(".py"):
        program = f"python benchmarks/{program}"
    return f"`{' '.join([program, *arguments])}` at {environment['sha'][:8]}"


def _table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    environment = first["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    title = (
        f"{first['num_prompts']} held-out prompts, greedy, {first['tokens_per_prompt']} tokens each, one at a time, "
        f"{first['dtype']}, {environment['device']} ({versions}; {_command(environment)}). "
        "Differences are against decoding without drafts.\n\n"
    )
    return title + HEADER + "".join(map(_line, rows)) + "\n"


def _sampled_table(rows: list[dict[str, Any]]) -> str:
    """Return tokens a step (and distinct 4-grams) by temperature."""
    first = rows[0]
    title = (
        f"Sampled, the same prompts, {first['tokens_per_prompt']} tokens each: tokens a step, and in brackets the share of "
        f"distinct 4-grams ({_command(first['environment'])}).\n\n"
    )
    temperatures = sorted({row["temperature"] for row in rows})
    header = (
        "| drafts | " + " | ".join(f"T = {t}" for t in temperatures) + " |\n" + "|---" * (len(temperatures) + 1) + "|\n"
    )
    cells: dict[str, dict[float, str]] = {}
    for row in rows:
        figure = f"{row['mean_accept_len']['all']:.2f} ({row['distinct_4grams']:.2f})"
        cells.setdefault(f"{row['shape']}, {row['drafts']}", {})[row["temperature"]] = figure
    lines = [f"| {name} | " + " | ".join(by_t[t] for t in temperatures) + " |\n" for name, by_t in cells.items()]
    return title + header + "".join(lines) + "\n"


def _engine_table(report: dict[str, Any]) -> str:
    """Return speeds of interleaved rounds; wrong tokens get no ratio."""
    setting, environment = report["setting"], report["environment"]
    title = (
        f"Speed, {setting['num_prompts']} prompts, greedy, {setting['max_new_tokens']} tokens each, {setting['batch_size']} at "
        f"a time, {setting['dtype']}, {environment['device']}: medians of {setting['rounds']} interleaved rounds "
        f"({_command(environment)}).\n\n"
    )
    header = (
        "| variant | tokens/s (range) | x no drafts | x transformers | tokens a step | state MiB | equal |\n"
        + "|---" * 7
        + "|\n"
    )
    return title + header + "".join(_engine_line(name, x) for name, x in report["variants"].items()) + "\n"


def _engine_line(name: str, x: dict[str, Any]) -> str:
    def times(ratio: dict[str, Any] | None) -> str:
        return "" if ratio is None or not x["equal"] else f"{ratio['median']:.2f}"

    speed = x["tokens_per_s"]
    cells = [
        name,
        f"{speed['median']:.0f} ({speed['low']:.0f}-{speed['high']:.0f})",
        times(x["over_none"]),
        times(x["over_transformers"]),
        "" if x["mean_accept_len"] is None else f"{x['mean_accept_len']:.2f}",
        "" if x["state_bytes"] is None else f"{x['state_bytes'] / 2**20:.2f}",
        "yes" if x["equal"] else "no",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _ops_table(first: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return the kernels that are held against something; what was not timed stands below with its reason."""
    from treewy.bench.ops.report import COLUMNS, STAGE_COLUMNS, notes, stage_rows, table_rows, title_of

    title = (
        f"Kernels, {title_of(first)} ({_command(first['environment'])}). Times are microseconds of one layer. % floor: the share "
        "of the time that moving the bytes at that copy speed would take; x: times as long as what stands under of; bar: what "
        "was aimed for."
    )
    remark = f" Here {first['remark']}." if "remark" in first else ""
    judged = [line for line in lines if line["bars"] or (line["us"] is None and line["row"] != "stages")]
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in table_rows(judged))
    folded = f"<details><summary>{len(judged)} rows</summary>\n\n{_head(COLUMNS)}{rows}\n</details>\n\n"
    staged = "".join(f"| {' | '.join(cells)} |\n" for cells in stage_rows(lines))
    if staged:
        staged = (
            f"By stages: the state's products, and what each further stage adds.\n\n{_head(STAGE_COLUMNS)}{staged}\n"
        )
    if not judged:
        folded = ""
    return f"{title}{remark}\n\n{folded}{staged}" + "".join(f"- {note}\n" for note in notes(lines)) + "\n"


def _head(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|\n"


def _attention_table(first: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return tree attention beside FlashAttention-3 on as many causal rows."""
    title = (
        f"Tree attention, 16 query and 2 KV heads of 256, pages of 16, bfloat16, {first['environment']['device']} "
        f"({_command(first['environment'])}): microseconds, and times FlashAttention-3's on as many causal rows.\n\n"
    )
    header = "| prefix | sequences | rows | us | FlashAttention-3 us | x |\n" + "|---" * 6 + "|\n"
    rows = "".join(
        f"| {x['length']} | {x['batch']} | {x['rows']} | {x['us']['ours']:.1f} "
        f"| {min(us for name, us in x['us'].items() if name.startswith('fa3')):.1f} | {x['ratio']:.2f} |\n"
        for x in lines
    )
    return f"{title}{header}{rows}\n"


def _vllm_table(files: list[list[dict[str, Any]]]) -> str:
    """Return vLLM engines side by side: a result file holds the lines of one process after the other."""
    engines = [process for lines in files for process in _processes(lines)]
    if not engines:
        return ""
    given, environment = engines[0][0]["options"], engines[0][0]["environment"]
    title = (
        f"vLLM {environment['versions']['vllm']}, dummy weights, MTP with synthetic acceptance, "
        f"{given['state_dtype']} state, prompts of {given['prompt']} and {given['output']} tokens generated, "
        f"{environment['device']}. Medians and ranges over rounds of one process. Whole runs count prefill, decoding alone does "
        "not.\n\n"
    )
    columns = (
        "model",
        "commit",
        "acceptance",
        "requests",
        "utilisation",
        "blocks x tokens",
        "decode tokens/s",
        "whole run tokens/s",
        "preemptions",
        "step, ms",
        "command",
    )
    return f"{title}{_head(columns)}{''.join(map(_vllm_lines, engines))}\n"


def _processes(lines: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    starts = [i for i, line in enumerate(lines) if "benchmark" in line]
    yield from (lines[start:end] for start, end in pairwise([*starts, len(lines)]))


def _vllm_lines(lines: list[dict[str, Any]]) -> str:
    first, start, *runs = lines
    rows = ""
    for run in runs:
        speeds = [
            f"{run[name]:,.0f} ({min(each):,.0f}-{max(each):,.0f})" if len(each) > 1 else f"{run[name]:,.0f}, one round"
            for name in ("decode_tokens_per_s", "tokens_per_s")
            for each in [[one[name] for one in run["rounds"]]]
        ]
        preemptions = sum(one["counters"].get("num_preemptions", 0) for one in run["rounds"])
        widths = first["options"].get("widths")
        cells = (
            vllm_model.shape(first["options"]),
            run["commit"] if widths is None else f"{run['commit']}, tree {','.join(map(str, widths))}",
            first["options"]["acceptance"],
            run["requests"],
            first["options"]["utilisation"],
            f"{start['num_blocks']} x {start['block_size']:,}",
            *speeds,
            f"{preemptions:.0f}",
            vllm_pairs.step_ms(run["requests"], run["rounds"]),
            _command(first["environment"]),
        )
        rows += f"| {' | '.join(map(str, cells))} |\n"
    return rows


def _pairs_table(lines: list[dict[str, Any]]) -> str:
    """Return vLLM engines that took turns."""
    first = next(entry["line"] for entry in lines if "benchmark" in entry["line"])
    given, environment = first["options"], first["environment"]
    shape = vllm_model.shape(given | {"runner": None})  # that is the engines'
    title = (
        f"vLLM {environment['versions']['vllm']} engines in turn, every process its own, {shape}, "
        f"{given['utilisation']} of the memory, "
        f"prompts of {given['prompt']} and {given['output']} tokens generated, {environment['device']}: "
        "medians (ranges) over rounds, ratios of medians. A step is one of all requests, where none was preempted.\n\n"
    )
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in vllm_pairs.table(lines))
    headers = [entry["line"]["environment"] for entry in lines if "benchmark" in entry["line"]]
    commands = ", ".join(dict.fromkeys(map(_command, headers)))
    return f"{title}{_head(vllm_pairs.COLUMNS)}{rows}\nThe processes were {commands}.\n\n"


def _line(row: dict[str, Any]) -> str:
    differences = f"{len(row['differences'])} in {row['compared_tokens']}"
    if row["differences"]:
        differences += f", widest gap {max(difference['gap'] for difference in row['differences']):.1g}"
    if "mean_accept_len" not in row:
        speed = f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else ""
        return f"| {row['shape']} | | | | | | {speed} | | {differences} |\n"
    lengths = row["mean_accept_len"]
    depths = " ".join(f"{rate:.2f}" for rate in row["accept_rate_by_depth"].values())
    cells = [
        "no drafts" if row["shape"] == "none" else row["shape"],
        row["policy"],
        f"{lengths['all']:.2f} ({lengths.get('prose', 0):.2f} / {lengths.get('code', 0):.2f})",
        f"{row['distinct_4grams']['all']:.2f}",
        depths,
        f"{row['not_first_sibling_share']:.1%}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['state_bytes'] / 2**20:.2f}",
        differences,
    ]
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    main()
