"""Tables and plots say what was measured, and what was not."""

import json
import sys
from pathlib import Path

import pytest

from treewy.bench.ops.measure import Result, Verdict
from treewy.bench.ops.plotting import Panel, load_pyplot, panels, plot
from treewy.bench.ops.report import notes, print_table, stage_rows, table_rows
from treewy.bench.timing import Spread
from treewy.errors import BackendError

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import report

HEADER = {
    "benchmark": "ops",
    "environment": {"device": "a GPU", "argv": ["treewy", "bench", "ops", "--json"], "sha": "0123456789"},
    "copy_gb_per_s": 4300.0,
    "backend": "triton",
    "num_replays": 40,
}


def line(name, us, shape="chain4", row="verify", **options):
    case = {"policy": "ring", "shape": shape, "batch_size": 8, "state": "bfloat16"}
    return Result(row, case, name, None if us is None else Spread.of(us), 5.0, **options).as_json()


LINES = [
    line(
        "treewy fast",
        [8.0, 7.0, 9.0],
        share_of_floor=0.625,
        bytes_per_seq=1_310_720,
        times={"peer": 1.14},
        bars=[Verdict("peer", 1.15, 1.14, "pass"), Verdict("floor", 0.65, 0.625, "miss")],
    ),
    line("peer", [7.0]),
    line("other peer", None, note="not importable"),
    line("treewy fast", [11.0], shape="tree15", row="trees"),
    line("treewy fast", [13.0], shape="ragged", row="ragged"),
    Result("accuracy", {"keys": "hard", "state": "float32"}, "treewy exact", error=1.5e-6).as_json(),
]


def test_rows_of_the_table():
    rows = table_rows(LINES)
    assert rows[0] == [
        "verify",
        "ring chain4 B8 bf16",
        "treewy fast",
        "8.0 (7.0-9.0)",
        "1.25",
        "62",
        "1.14",
        "peer",
        "<= 1.15: pass",
    ]
    assert rows[1] == [""] * 8 + [">= 65 %: miss"]
    assert rows[2][2:4] == ["peer", "7.0 (7.0-7.0)"]
    assert rows[3][2:4] == ["other peer", ""]
    assert rows[-1][:4] == ["accuracy", "hard fp32", "treewy exact", "1.5e-06"]
    assert notes(LINES) == ["verify, other peer: not importable"]


def test_no_figure_is_cut_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_table(HEADER, LINES)
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(text in out for text in ("8.0 (7.0-9.0)", "<= 1.15: pass", "a GPU", "4300 GB/s", "not importable"))


def test_panels_of_a_plot():
    """Rows with other problems stay out; times are sorted by rows, floors beside."""
    assert panels(reversed(LINES)) == [
        Panel(
            "ring, bf16 state, B = 8",
            {"treewy fast": [(4, 8.0), (15, 11.0)], "floor": [(4, 5.0), (15, 5.0)], "peer": [(4, 7.0)]},
        )
    ]


class Canvas:
    """What is asked of matplotlib."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def ask(*args, **options):
            self.asked.append((name, args, options))
            return (self, [[self]]) if name == "subplots" else None

        return ask


def test_drawing(tmp_path):
    canvas, file = Canvas(), tmp_path / "times.svg"
    plot(canvas, LINES, file)
    drawn = [(args, options["label"]) for name, args, options in canvas.asked if name == "plot"]
    assert ((([4, 15], [8.0, 11.0], "o-"), "treewy fast")) in drawn
    assert ((([4, 15], [5.0, 5.0], "k--"), "floor")) in drawn
    assert ("savefig", (file,), {"bbox_inches": "tight"}) in canvas.asked


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(BackendError, match="pip install matplotlib"):
        load_pyplot()


def test_the_table_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert report.tables() == ""
    file = tmp_path / "benchmarks" / "results" / "ops-h200.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in (HEADER, *LINES)))
    table = report.tables()
    assert "`treewy bench ops --json` at 01234567" in table
    assert (
        "| verify | ring chain4 B8 bf16 | treewy fast | 8.0 (7.0-9.0) | 1.25 | 62 | 1.14 | peer | <= 1.15: pass |\n"
        in table
    )
    assert "| row | problem | who |" in table
    assert "not importable" in table


STAGED = [
    line("state", [20.0], shape="chain8", row="stages"),
    line("state+gram", [23.0], shape="chain8", row="stages", note="gram adds 3.0 us, binds"),
    line("state+gram+solve", [24.0], shape="chain8", row="stages", note="solve adds 1.0 us"),
    line("state+gram+solve+output", [24.5], shape="chain8", row="stages", note="output adds 0.5 us"),
    line("state+gram+solve+output", [18.0], row="stages", note="all at once"),
]


def test_stages_are_a_table_of_their_own(capsys):
    """What each stage adds, and which of them bind; nothing of it in the other table or in the notes."""
    assert stage_rows([*LINES, *STAGED]) == [
        ["ring chain8 B8 bf16", "20.0", "3.0", "1.0", "0.5", "24.5", "gram"],
        ["ring chain4 B8 bf16", "", "", "", "", "18.0", "all at once"],
    ]
    assert table_rows(LINES + STAGED) == table_rows(LINES)
    assert notes(LINES + STAGED) == notes(LINES)
    print_table(HEADER, LINES + STAGED)
    assert "binds" in capsys.readouterr().out
    print_table(HEADER, LINES)
    assert "binds" not in capsys.readouterr().out
