"""docs/vllm.md says what the plugin does: its options, its log, its arithmetic, its messages, the figures that were measured."""

import json
import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
import vllm_pairs

from treewy.errors import RequestError, UnsupportedError
from treewy.planner.catalogue import find_gpu, model_preset
from treewy.vllm_plugin import counts, intake, options, scrape, versions
from treewy.vllm_plugin.accounting import Account, account, log_lines, predict_layout, rows_of
from treewy.vllm_plugin.counts import Numbers, log_line
from treewy.vllm_plugin.metrics import WorkerExtension, read
from treewy.vllm_plugin.options import KEYS, Options, parse
from treewy.vllm_plugin.refusals import check_tree_size, refuse
from treewy.vllm_plugin.versions import Version
from vllm_plugin.rows import Engine
from vllm_plugin.stand_in import config
from vllm_plugin.test_counts import worker

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "vllm.md").read_text()
README = (ROOT / "README.md").read_text()
SPEC = model_preset("qwen3.5-35b-a3b").spec
BLOCKS = predict_layout(SPEC, drafts=3, dtype="bfloat16", state_dtype="float32")
# Blocks that vLLM 0.26 made of 0.6 of an H200 without the plugin, and of the rest of 0.9 beside them.
AT_60 = 675 * BLOCKS.block_bytes
AT_90 = AT_60 + int(0.3 * find_gpu("h200").memory_bytes)


def made(commit: options.Commit, *, total: int = AT_60, requests: int = 256, max_model_len: int = 4096) -> Account:
    asked = Options(commit)
    bounds: dict[str, Any] = {"drafts": 3, "max_num_seqs": requests, "dtype": "bfloat16", "state_dtype": "float32"}
    rows = rows_of(SPEC, asked, **bounds)
    available = total - rows.num_bytes
    return account(BLOCKS, rows, asked, drafts=3, max_model_len=max_model_len, available=available)


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table behind a text, without its two lines of heading."""
    lines = PAGE.split(heading, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = lines[start : start + lines[start:].index("")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def commands(page: str) -> list[list[str]]:
    """Return the words of every `vllm serve` in a page, from there on."""
    lines = [line for line in page.splitlines() if re.match(r"(\w+=\w+ )*vllm serve ", line)]
    return [words[words.index("vllm") :] for words in map(shlex.split, lines)]


def asked_for(words: list[str]) -> Options:
    flags = dict(pairwise(words))
    additional = json.loads(flags.get("--additional-config", "{}"))
    speculative = json.loads(flags["--speculative-config"])
    section = {key: value for key, value in speculative.items() if key in KEYS} | additional.get("treewy", {})
    return parse({"treewy": section})


def test_every_option_is_described() -> None:
    rows = {row[0].strip("`"): row for row in table("## Options")}
    assert set(rows) == set(KEYS)
    defaults = {field.name: field.default for field in fields(Options)}
    assert rows[options.COMMIT][1] == ", ".join(f"`{name}`" for name in get_args(options.Commit))
    assert rows[options.COMMIT][2] == f"`{defaults['commit']}`"
    assert rows[options.RING_CAPACITY][1:3] == [f"1 to {options.MAX_ROWS}", str(defaults["ring_capacity"])]
    assert rows[options.CHECK_EVERY][2] == str(defaults["check_every"])


def test_every_metric_is_described() -> None:
    described = {name: row for row in table("## Watching it") for name in re.findall(r"`(.*?)`", row[0])}
    shown = {scrape.LENGTHS, f"{scrape.DEPTHS}_total"}
    assert set(described) == shown | set(read(worker(Engine(16))))
    assert all(
        ("/metrics" in row[2], "worker" in row[2]) == (name in shown, name not in shown)
        for name, row in described.items()
    )
    assert WorkerExtension.treewy_metrics.__name__ in PAGE
    assert f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}" in PAGE
    assert f"every {counts.DEFAULT_INTERVAL:.0f} seconds, or as often as\n`{counts.INTERVAL}` says" in PAGE


def test_the_line_of_the_log() -> None:
    numbers = Numbers(310, 305, 3 * 9920, 0, (2976, 2976, 1885, 2083), 9880)
    assert f"{counts.logger.name}" in PAGE
    assert re.findall(r"^INFO .*?\] (treewy: .*)$", PAGE, flags=re.M) == [log_line(numbers)]


def test_every_command_asks_for_something() -> None:
    assert [asked_for(words) for words in commands(PAGE)] == [
        Options("reconstruct"),
        Options("reconstruct"),
        Options("ring", ring_capacity=8),
        Options("reconstruct", widths=(2, 2, 2)),
    ]
    assert commands(README) == commands(PAGE)[:1]


def test_the_start_up_log() -> None:
    """As an engine prints it, which has the number of its blocks and not the bytes that they were made of."""
    ours = made("reconstruct")
    whole = account(
        BLOCKS,
        ours.rows,
        Options("reconstruct"),
        drafts=3,
        max_model_len=4096,
        available=ours.treewy.num_blocks * BLOCKS.block_bytes,
    )
    [shown] = re.findall(r"^```text\n(treewy: .*?)^```", PAGE, flags=re.M | re.S)
    assert shown.splitlines() == log_lines(whole)


@pytest.mark.parametrize("row", table("by KV tokens without it"), ids=lambda row: row[0])
def test_the_table_of_what_to_expect(row: list[str]) -> None:
    length = int(row[0].replace(",", ""))
    cases = [{}, {"requests": 32}, {"total": AT_90}]
    accounts = [made("reconstruct", max_model_len=length, **case) for case in cases]
    assert row[1:] == [f"{one.treewy.kv_tokens / one.stock.kv_tokens:.2f}" for one in accounts]


def test_bytes_in_the_text() -> None:
    rows = made("reconstruct").rows
    assert f"takes {rows.row_bytes:,} bytes in each of its {rows.num_layers} layers" in PAGE
    assert f"has {rows.num_bytes / 256 / 1e6:.2f} MB of rows" in PAGE
    assert f"9 blocks of {BLOCKS.block_bytes / 1e6:.1f} MB" in PAGE
    few, many = (made("reconstruct", requests=requests).rows.num_bytes / 1e9 for requests in (128, 1024))
    assert f"{many:.1f} GB of rows for the 35B-A3B, against {few:.1f} GB for 128" in " ".join(PAGE.split())
    ours = made("reconstruct", max_model_len=1192)
    assert (
        f"hold {int(ours.stock.requests)} requests of 1,192 tokens with snapshots, and {int(ours.treewy.requests)}"
        in PAGE
    )


def test_kv_tokens_that_were_logged() -> None:
    ours = {commit: made(commit).treewy.kv_tokens for commit in ("reconstruct", "ring")}
    stock = made("reconstruct").stock.kv_tokens
    shown = f"{stock:,}\nand {ours['reconstruct']:,} KV tokens at 4,096, and {ours['ring']:,} with `ring`"
    assert shown in PAGE


def results(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def rounds(utilisation: str, requests: int, commit: str, speed: str) -> list[float]:
    """Return what the rounds of all processes of an engine measured."""
    lines = [entry["line"] for entry in results(f"pairs-h200-{utilisation}.jsonl")]
    runs = [x for x in lines if x.get("row") == "run" and (x["requests"], x["commit"]) == (requests, commit)]
    return [one[speed] for run in runs for one in run["rounds"]]


def spread(each: list[float]) -> str:
    if len(each) == 1:
        return f"{each[0]:,.0f}"
    return f"{median(each):,.0f} ({min(each):,.0f}-{max(each):,.0f})"


def test_speed_is_that_of_the_result_files() -> None:
    rows = [[cell.strip("*") for cell in row] for row in table("[README](../README.md) has all of it")]
    commits = ("none", "store_all", "reconstruct")
    wanted = [("0.6", 256, commit) for commit in commits] + [
        ("0.9", count, commit) for count in (128, 1) for commit in commits[1:]
    ]
    for row, engine in zip(rows, wanted, strict=True):
        measured = [rounds(*engine, speed) for speed in ("decode_tokens_per_s", "tokens_per_s")]
        of = {
            base: [median(rounds(*engine[:2], base, speed)) for speed in ("decode_tokens_per_s", "tokens_per_s")]
            for base in ("store_all", "none")
            if base != engine[2] and rounds(*engine[:2], base, "tokens_per_s")
        }
        decode, whole = map(median, measured)
        over = [f"{decode / of[base][0]:.2f}" if base in of else "" for base in ("store_all", "none")]
        last = f"{whole / of['store_all'][1]:.2f}" if "store_all" in of else ""
        assert row[2:] == [spread(measured[0]), *over, spread(measured[1]), last]
    assert f"{rows[6][3]} to {rows[4][3]}\n  times the speed" in PAGE
    assert f"{float(rows[2][3]):.2f} times its decode tokens/s, and {float(rows[6][3]):.2f} times" in README


def test_the_sweep_in_one_sentence() -> None:
    page = (ROOT / "docs" / "sweep.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    # The first table's rows: that of compiled engines comes after it.
    bound, ample = (
        next(row[2] for row in rows if row[0] == f"{regime}: reconstruct") for regime in ("memory-bound", "ample")
    )
    assert f"{bound} times the tokens/s of snapshots where these ran out of blocks, and {ample} times elsewhere" in PAGE


def test_speed_of_trees_is_that_of_the_result_files() -> None:
    rows = [[cell.strip("*") for cell in row] for row in table("Trees, at 0.9 of the memory")]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    widths = ""
    for line in results("vllm-h200-trees.jsonl"):
        widths = f"{line['options']['widths']}" if "options" in line else widths
        if line.get("row") == "run":
            runs[widths, line["requests"]] = line["rounds"]
    for entry in results("pairs-h200-0.9.jsonl"):
        line = entry["line"]
        if line.get("row") == "run" and line["commit"] == "reconstruct":
            runs.setdefault(("chain of 3", line["requests"]), []).extend(line["rounds"])
    assert len(rows) == 9
    for row in rows:
        each = runs[row[0].strip("`"), int(row[1])]
        base = median(one["decode_tokens_per_s"] for one in runs["chain of 3", int(row[1])])
        speed = [one["decode_tokens_per_s"] for one in each]
        over = "" if row[0] == "chain of 3" else f"{median(speed) / base:.2f}"
        assert row[3:] == [vllm_pairs.step_ms(int(row[1]), each), spread(speed), over]


def test_messages_in_troubleshooting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user searches the page for is what the plugin says."""
    messages = []
    monkeypatch.setattr("treewy.vllm_plugin.facts.platform", lambda: "cuda")
    with pytest.raises(UnsupportedError) as first:
        refuse(config(use_v2_model_runner=False, cache__mamba_cache_mode="align"), Options("reconstruct"))
    messages.append(str(first.value))
    for version, mismatches in ((Version(0, 25, 0), []), (Version(0, 30, 0), ["x is missing"])):
        monkeypatch.setattr(versions, "installed", lambda version=version: version)
        monkeypatch.setattr(versions, "find_mismatches", lambda mismatches=mismatches, **_: mismatches)
        with pytest.raises(UnsupportedError) as caught:
            versions.check(on_cpu=False)
        messages.append(str(caught.value))
    with pytest.raises(RequestError) as number:
        check_tree_size(Options("reconstruct", (2, 2, 2)), 3)
    messages.append(str(number.value))
    with pytest.raises(RequestError) as unknown:
        parse({options.SECTION: {"mamba_state_comit": "ring"}})
    messages.append(str(unknown.value))
    shown = [" ".join(text.split()) for text in re.findall(r"^\*\*`([^`]*)`\.\*\*", PAGE, flags=re.M)]
    assert len(shown) == len(messages)
    assert all(text in message for text, message in zip(shown, messages, strict=True))


def test_the_entry_point_is_the_one_that_is_shown() -> None:
    assert '[project.entry-points."vllm.general_plugins"]\ntreewy = ' in (ROOT / "pyproject.toml").read_text()
    assert "entry point `treewy` of the group `vllm.general_plugins`" in PAGE
    assert intake.SECTION in PAGE
