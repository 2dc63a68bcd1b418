"""Engines in turn: who runs when, what is kept, and what the table makes of it."""

import json
import sys

import pytest
import report
import vllm_pairs

# Stands for vllm_engine.py: prints what that prints, and vLLM's own words between.
PROGRAM = """
import json, sys
arguments = sys.argv[1:]
commit = arguments[arguments.index("--commit") + 1]
print("INFO a word of vLLM's")
print(json.dumps({"benchmark": "vllm", "arguments": arguments}), flush=True)
if commit == "fails":
    sys.exit(3)
speed = {"store_all": 100, "reconstruct": 250, "none": 200}[commit] + len(arguments)
counters = {"num_preemptions": 4}
rounds = [{"decode_tokens_per_s": speed + x, "tokens_per_s": speed / 2, "counters": counters} for x in (0, 40)]
print(json.dumps({"row": "run", "commit": commit, "requests": 8, "rounds": rounds}))
"""


@pytest.fixture
def call(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(vllm_pairs, "PROGRAM", program)
    file = tmp_path / "pairs.jsonl"

    def get(*arguments):
        monkeypatch.setattr(sys, "argv", ["vllm_pairs.py", "--json", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            vllm_pairs.main()
        return ended.value.code, [json.loads(line) for line in file.read_text().splitlines()]

    return get


def test_engines_take_turns_and_all_their_lines_are_kept(call, capfd):
    code, lines = call("--turns", "3", "--", "--requests", "8")
    assert not code
    ran = [line["engine"].split()[1] for line in lines if "benchmark" in line["line"]]
    assert ran == [
        *("store_all", "reconstruct", "none"),
        *("none", "reconstruct", "store_all"),
        *("store_all", "reconstruct", "none"),
    ]
    assert lines[0] == {
        "turn": 0,
        "engine": "--commit store_all",
        "line": {"benchmark": "vllm", "arguments": ["--commit", "store_all", "--requests", "8"]},
    }
    assert [line["line"] for line in lines if line["line"].get("row") == "exit"] == [{"row": "exit", "code": 0}] * 9
    out, err = capfd.readouterr()
    assert err.count("INFO a word of vLLM's") == 9
    assert "reconstruct | 8 | 3 | 274 (254-294) | 2.21 | 1.22 | 127 (127-127) | 2.44 | 1.25 | 4 | " in out


def test_a_later_call_adds_to_the_file(call, capfd):
    call("--turns", "1", "--engine", "--commit none")
    _, lines = call("--turns", "1", "--engine", "--commit reconstruct --widths 3,3", "--engine", "--commit none")
    rows = {row[0]: row for row in vllm_pairs.table(lines)}
    assert rows["none"][:3] == ["none", "8", "2"]
    # Nobody to be held against.
    assert rows["reconstruct --widths 3,3"][4:6] == ["", f"{(254 + 20) / (202 + 20):.2f}"]


def test_an_engine_that_fails_does_not_stop_the_others(call):
    code, lines = call("--turns", "1", "--engine", "--commit fails", "--engine", "--commit none")
    assert code == 1
    assert [line["line"]["code"] for line in lines if line["line"].get("row") == "exit"] == [3, 0]
    assert [row[0] for row in vllm_pairs.table(lines)] == ["none"]


def test_the_table_of_the_readme(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    given = {"utilisation": 0.6, "prompt": 1024, "output": 168}
    environment = {
        "versions": {"vllm": "0.26.0"},
        "device": "a GPU",
        "sha": "0123456789",
        "argv": ["vllm_engine.py", "--x"],
    }
    lines = [{"benchmark": "vllm", "environment": environment, "options": given}]
    for commit, speed in (("store_all", 1000.0), ("reconstruct", 2000.0)):
        rounds = [{"decode_tokens_per_s": speed, "tokens_per_s": speed, "counters": {}}]
        lines.append({"row": "run", "requests": 256, "rounds": rounds, "commit": commit})
    engines = ("--commit store_all", "--commit store_all", "--commit reconstruct")
    entries = [{"turn": 0, "engine": engine, "line": line} for engine, line in zip(engines, lines, strict=True)]
    (results / "pairs-h200.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    table = report.tables()
    assert "The processes were `python benchmarks/vllm_engine.py --x` at 01234567.\n" in table
    assert "0.6 of the memory, prompts of 1024 and 168 tokens generated, a GPU: medians" in table
    assert "| reconstruct | 256 | 1 | 2,000 (2,000-2,000) | 2.00 |  | 2,000 (2,000-2,000) | 2.00 |  | 0 |" in table


@pytest.mark.parametrize(
    ("count", "counters", "shown"),
    [
        (8, {"spec_decode_num_drafts": 100, "spec_decode_num_accepted_tokens": 150}, "40.0"),  # 8 x 2.5 tokens
        (8, {"spec_decode_num_drafts": 100, "spec_decode_num_accepted_tokens": 150, "num_preemptions": 1}, ""),
        (1, {}, "2.0"),  # without drafts a step brings one
    ],
)
def test_a_step_takes_what_its_tokens_take(count, counters, shown):
    rounds = [{"decode_tokens_per_s": speed, "counters": counters} for speed in (250, 500, 1000)]
    assert vllm_pairs.step_ms(count, rounds) == shown
