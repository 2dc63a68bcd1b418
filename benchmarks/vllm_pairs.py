"""vLLM engines in turn, several times: python benchmarks/vllm_pairs.py --turns 3 --json pairs.jsonl -- --requests 256 128.

Runs vllm_engine.py once per engine and turn, every time in a process of its own; the order turns round every time, so that a
machine that slows down is no engine's advantage. Arguments after `--` go to every engine. Each line of every process is
appended to the file as it is, with its turn and engine; the table counts all that the file holds, earlier calls' as well.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

ENGINES = ("--commit store_all", "--commit reconstruct", "--commit none")
PROGRAM = Path(__file__).parent / "vllm_engine.py"
# The engines that others are held against.
BASES = ("store_all", "none")
SPEEDS = ("decode_tokens_per_s", "tokens_per_s")
COLUMNS = (
    "engine",
    "requests",
    "processes",
    *(f"{speed}, tokens/s{over}" for speed in ("decode", "whole run") for over in ("", *(f" x {x}" for x in BASES))),
    "preemptions",
    "step, ms",
)


def options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", action="append", help=f"options of one engine, quoted; again for more. Else {', '.join(ENGINES)}")
    add("--turns", type=int, default=3)
    add("--json", type=Path, required=True, help="append all lines to this file")
    add("shared", nargs="*", help="options of every engine, after --")
    return parser.parse_args()


def main() -> None:
    """Run the engines and print the table; exits with 1 if one of them failed."""
    given = options()
    engines = given.engine or list(ENGINES)
    failed = False
    for turn in range(given.turns):
        for engine in engines if turn % 2 == 0 else reversed(engines):
            code = run(engine, [*shlex.split(engine), *given.shared], turn, given.json)
            failed |= code != 0
    lines = [json.loads(line) for line in given.json.read_text().splitlines()]
    print("\n".join(" | ".join(cells) for cells in (COLUMNS, *table(lines))))
    sys.exit(failed)


def run(engine: str, arguments: list[str], turn: int, file: Path) -> int:
    """Run one engine and return its exit code; what it prints beside JSON lines goes to stderr."""
    process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, file.open("a") as sink:

        def keep(line: Any) -> None:
            sink.write(json.dumps({"turn": turn, "engine": engine, "line": line}) + "\n")
            sink.flush()

        for text in process.stdout:
            if text.startswith("{"):
                keep(json.loads(text))
            else:
                sys.stderr.write(text)
        code = process.wait()
        keep({"row": "exit", "code": code})
    print(f"turn {turn}: {engine}: exit code {code}", file=sys.stderr, flush=True)
    return code


def label(engine: str) -> str:
    """Return an engine's name: its options, less the word that all have."""
    return engine.removeprefix("--commit ")


def table(lines: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a row per engine and number of requests: medians and ranges over all rounds, ratios of medians."""
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    processes: dict[tuple[int, str], int] = {}
    for entry in lines:
        line = entry["line"]
        if line.get("row") == "run":
            key = line["requests"], label(entry["engine"])
            rounds.setdefault(key, []).extend(line["rounds"])
            processes[key] = processes.get(key, 0) + 1
    return [
        [key[1], str(key[0]), str(processes[key]), *_speeds(rounds, key), *_of_steps(key[0], rounds[key])]
        for key in sorted(rounds)
    ]


def _speeds(rounds: dict[tuple[int, str], list[dict[str, Any]]], key: tuple[int, str]) -> list[str]:
    cells = []
    for speed in SPEEDS:
        each = [one[speed] for one in rounds[key]]
        cells.append(f"{median(each):,.0f} ({min(each):,.0f}-{max(each):,.0f})")
        for base in BASES:
            others = [one[speed] for one in rounds.get((key[0], base), [])]
            cells.append(f"{median(each) / median(others):.2f}" if others else "")
    return cells


def _of_steps(count: int, rounds: list[dict[str, Any]]) -> list[str]:
    preemptions = median(one["counters"].get("num_preemptions", 0) for one in rounds)
    return [f"{preemptions:.0f}", step_ms(count, rounds)]


def step_ms(count: int, rounds: list[dict[str, Any]]) -> str:
    """Return the median of how long a decoding step of all requests takes; nothing if not all of them ran at once.

    They did not where one was preempted. Else a step brings each its tokens, accepted drafts and one more.
    """
    each = []
    for one in rounds:
        counters = one["counters"]
        if counters.get("num_preemptions", 0):
            return ""
        drafts = counters.get("spec_decode_num_drafts", 0)
        tokens = 1 + counters["spec_decode_num_accepted_tokens"] / drafts if drafts else 1
        each.append(1e3 * count * tokens / one["decode_tokens_per_s"])
    return f"{median(each):.1f}"


if __name__ == "__main__":
    main()
