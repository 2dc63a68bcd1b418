"""docs/sweep.md's tables and plots, from made-up rows in a folder of their own."""

import json
import sys

import pytest
import report
import sweep_report
from sweep_plots import draw
from sweep_report import Where, read, regime, section

ENVIRONMENT = {
    "argv": ["vllm_sweep.py", "--commit", "reconstruct"],
    "sha": "0123456789abcdef",
    "versions": {"vllm": "0.26.0"},
    "device": "a GPU",
}
OPTIONS = {"tiny": False, "layers": 40, "mix": "sharegpt", "state_dtype": "float32", "max_model_len": 4096}


def point(commit, concurrency, speed, p99, **changes):
    row = {
        "row": "point",
        "commit": commit,
        "widths": None,
        "utilisation": 0.6,
        "arrivals": "closed",
        "concurrency": concurrency,
        "output_tokens_per_s": speed,
        "ttft_ms": {"count": 50, "p50": p99 / 2, "p99": p99},
        "oldest_waiting_ms": 0.0,
        "tpot_ms": {"count": 50, "p50": 1000.0 * concurrency / speed, "p99": 2000.0 * concurrency / speed},
        "peak_kv_percent": 40.0,
        "peak_running": concurrency,
        "peak_waiting": 0,
        "queued_share": 0.0,
        "preemptions": 0,
        "accepted_per_step": None if commit == "none" else 3.24,
    }
    return row | changes


STARVED = {"queued_share": 1.0, "peak_kv_percent": 98.2, "peak_running": 51, "peak_waiting": 77}
SNAPSHOTS = [point("store_all", 8, 1000, 100.0), point("store_all", 128, 4000, 6000.0, **STARVED)]
OURS = [point("reconstruct", 8, 950, 110.0), point("reconstruct", 128, 8000, 300.0)]
PLAIN = [point("none", 8, 500, 90.0), point("none", 128, 5000, 200.0)]


@pytest.fixture
def write(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()

    def put(name, rows, **options):
        start = {"row": "start", "seconds": 30.0, "num_blocks": 622, "block_size": 1072}
        header = {"benchmark": "vllm sweep", "environment": ENVIRONMENT, "options": OPTIONS | options}
        with (folder / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in (header, start, *rows))
        return folder

    return put


def lines_of(text, *starts):
    return [line for line in text.splitlines() if line.startswith(tuple(f"| {start} |" for start in starts))]


def test_without_results_there_is_no_table(tmp_path):
    assert section(tmp_path, tmp_path) == "\nThere are no results yet.\n\n"


def test_points_stand_where_the_snapshots_put_them(write, tmp_path):
    write("sweep-a.jsonl", SNAPSHOTS)
    write("sweep-b.jsonl", OURS)
    text = section(write("sweep-c.jsonl", PLAIN), tmp_path)
    bound, ample = text.split("#### Memory-bound\n")[1].split("#### Ample\n")
    assert [line.split(" | ")[1:3] for line in lines_of(bound, "0.6")] == [
        ["128 at once", "none"],
        ["128 at once", "reconstruct"],
        ["128 at once", "store_all"],
    ]
    assert len(lines_of(ample, "0.6")) == 3
    assert (
        "| 0.6 | 128 at once | reconstruct | 1 | 8,000 | 2.00 | 1.60 | 150 / 300 | 20.00 | 16.0 / 32.0 | 2.00 | 40 % "
        "| 128 / 0 | 0 | 3.24 |"
    ) in bound
    assert (
        "| 0.6 | 128 at once | store_all | 1 | 4,000 |  | 0.80 | 3,000 / 6,000 |  | 32.0 / 64.0 |  | 98 % | 51 / 77 | 0 | 3.24 |"
    ) in bound
    assert "| none | 1 | 500 | 0.50 |  | 45 / 90 | 1.11 |" in ample
    assert lines_of(ample, "0.6")[0].endswith("| - |")
    assert "- `vllm_sweep.py --commit reconstruct` at 01234567\n" in text


def test_the_summary_stands_beside_the_papers(write, tmp_path):
    write("sweep-a.jsonl", [*SNAPSHOTS, point("store_all", 256, 1000, 6000.0, **STARVED)])
    text = section(write("sweep-b.jsonl", [*OURS, point("reconstruct", 256, 8000, 3000.0)]), tmp_path)
    assert "| memory-bound: the paper, 35B, one B200 | 31 of 105 | 1.15 | 2.94 | 0.83 |" in text
    # Geometric: 2 and 8 are 4, 20 and 2 are 6.32.
    assert "| memory-bound: reconstruct | 2 of 3 | 4.00 | 6.32 | 4.00 |" in text
    assert "| ample: reconstruct | 1 of 3 | 0.95 | 0.91 | 0.95 |" in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "ample"),
        ({"peak_kv_percent": 98.9, "queued_share": 0.09}, "ample"),
        ({"peak_kv_percent": 99.0}, "memory-bound"),
        ({"preemptions": 1}, "memory-bound"),
        ({"queued_share": 0.1}, "memory-bound"),
    ],
)
def test_what_is_memory_bound(write, changes, name):
    """It is the snapshots' engine that says so, not the one that is held against it."""
    full = {"preemptions": 9, "queued_share": 1.0, "peak_kv_percent": 100.0}
    rows = [point("store_all", 8, 1000, 100.0, **changes), point("reconstruct", 8, 1000, 100.0, **full)]
    (figures,) = read(write("sweep-a.jsonl", rows))[0].values()
    assert regime(figures[Where(0.6, "closed", 8)]) == name


def test_without_snapshots_nothing_is_compared(write, tmp_path):
    text = section(write("sweep-a.jsonl", [*OURS, *PLAIN]), tmp_path)
    assert "#### No snapshots to compare with" in text
    assert "| 0.6 | 128 at once | reconstruct | 1 | 8,000 |  | 1.60 | 150 / 300 |  | 16.0 / 32.0 |  |" in text
    assert "ample: reconstruct" not in text


def test_who_still_waits_makes_a_time_the_least_that_it_can_be(write, tmp_path):
    starved = STARVED | {"oldest_waiting_ms": 9000.0}
    none = {"count": 0, "p50": None, "p99": None}
    rows = [
        point("store_all", 128, 4000, 6000.0, **starved),
        point("reconstruct", 128, 8000, 300.0, oldest_waiting_ms=370.0),
        point("store_all", 256, 4000, 1.0, **starved | {"ttft_ms": none, "tpot_ms": none}),
        point("reconstruct", 256, 8000, 500.0, oldest_waiting_ms=800.0),
    ]
    text = section(write("sweep-a.jsonl", rows), tmp_path)
    assert "| 3,000 / at least 9,000 |" in text
    # 370 is within a quarter of 300; the longest wait is what is given.
    assert "| reconstruct | 1 | 8,000 | 2.00 |  | 150 / 370 | at least 24.32 |" in text
    assert "| store_all | 1 | 4,000 |  |  | - / at least 9,000 |  | - / - |  |" in text
    assert "| reconstruct | 1 | 8,000 | 2.00 |  | 250 / at least 800 |  |" in text
    assert "| memory-bound: reconstruct | 2 of 2 | 2.00 | at least 24.32 | 2.00 |" in text


def test_runs_of_the_same_point_make_medians(write, tmp_path):
    write("sweep-a.jsonl", SNAPSHOTS)
    for speed, kv in ((7000, 30.0), (9000, 60.0), (8500, 50.0)):
        write("sweep-b.jsonl", [point("reconstruct", 128, speed, 300.0, peak_kv_percent=kv)])
    text = section(write("sweep-c.jsonl", []), tmp_path)
    assert "| 0.6 | 128 at once | reconstruct | 3 | 8,500 | 2.12 |" in text
    assert "| 60 % |" in text


def test_trees_and_arrivals_have_rows_of_their_own(write, tmp_path):
    tree = point("reconstruct", 128, 6000, 300.0, widths=[3, 3, 3])
    coming = {"arrivals": "poisson", "rate": 8.5}
    poisson = {key: value for key, value in point("reconstruct", 1, 100, 9.0).items() if key != "concurrency"} | coming
    text = section(write("sweep-a.jsonl", [*SNAPSHOTS, tree, poisson]), tmp_path)
    assert "| 0.6 | 128 at once | reconstruct 3,3,3 | 1 | 6,000 | 1.50 |" in text
    assert "| 0.6 | 8.5 a second | reconstruct | 1 | 100 |  |" in text


def test_what_differs_in_its_setting_is_not_compared(write, tmp_path):
    write("sweep-a.jsonl", SNAPSHOTS, state_dtype="bfloat16")
    text = section(write("sweep-b.jsonl", OURS), tmp_path)
    assert text.count("### a GPU, vLLM 0.26.0") == 2
    assert "| reconstruct | 1 | 8,000 |  |" in text


class Canvas:
    """What is asked of matplotlib."""

    def __init__(self):
        self.asked, self.rcParams = [], {}

    def __getattr__(self, name):
        def ask(*args, **options):
            self.asked.append((name, args, options))
            if name == "savefig":
                args[0].write_text("<svg/>")
            return (self, [[self] * args[1]] * 2) if name == "subplots" else None

        return ask


def test_compiled_engines_are_their_own_table_and_picture(write, tmp_path):
    folder = write("sweep-a.jsonl", [*SNAPSHOTS, *OURS])
    write("sweep-b.jsonl", [*SNAPSHOTS, *OURS], compiled=True)
    text = section(folder, tmp_path)
    assert text.count("### a GPU, vLLM 0.26.0") == 2
    assert text.count("40 layers, compiled, dummy weights") == 1
    names = {file.name for file in draw(Canvas(), folder, tmp_path)}
    start, end = "sweep-qwen3.5-35b-a3b-", "sharegpt-float32-4096-closed.svg"
    assert names == {f"{start}{end}", f"{start}compiled-{end}"}


def test_pictures_stand_on_the_page(write, tmp_path):
    canvas = Canvas()
    more = [point("store_all", 8, 1200, 80.0, utilisation=0.9, oldest_waiting_ms=500.0)]
    folder = write("sweep-a.jsonl", [*SNAPSHOTS, *OURS, *more])
    (file,) = draw(canvas, folder, tmp_path)
    assert file.name == "sweep-qwen3.5-35b-a3b-sharegpt-float32-4096-closed.svg"
    drawn = [(args, options["label"]) for name, args, options in canvas.asked if name == "plot"]
    assert (([8, 128], [950, 8000], "o-"), "reconstruct") in drawn
    assert (([8, 128], [100.0, 6000.0], "o-"), "store_all") in drawn
    assert (([8], [1200], "o-"), "store_all") in drawn
    # Somebody has waited so long already.
    assert [args for args, label in drawn if args[0] and label is None] == [((8,), (500.0,), "^")]
    # The paper's pair, where it was measured, and nowhere else.
    assert [args for args, label in drawn if label and "paper" in label] == [
        ([128], [683.0], "*"),
        ([128], [27489.0], "*"),
    ]
    assert f"]({file.name})" in section(folder, tmp_path)
    assert "](" not in section(folder, folder)


def test_the_command_writes_the_page_and_sees_that_it_is_old(write, tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "benchmarks").mkdir(parents=True)
    (root / "docs").mkdir()
    write("sweep-a.jsonl", SNAPSHOTS).rename(root / "benchmarks" / "results")
    for page in ("README.md", "docs/sweep.md"):
        (root / page).write_text(f"Before.\n{report.BEGIN}old\n{report.END}\nAfter.\n")
    monkeypatch.setattr(report, "ROOT", root)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    with pytest.raises(SystemExit, match=r"README.md, sweep.md"):
        report.main()
    assert "old" in (root / "docs" / "sweep.md").read_text()
    monkeypatch.setattr(sys, "argv", ["report.py"])
    report.main()
    assert (root / "README.md").read_text() == f"Before.\n{report.BEGIN}{report.END}\nAfter.\n"
    page = (root / "docs" / "sweep.md").read_text()
    assert page.startswith("Before.\n")
    assert "128 at once" in page
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    report.main()


def test_the_page_says_the_rule():
    """docs/sweep.md gives the figures of the rule in words."""
    page = " ".join((report.ROOT / "docs" / "sweep.md").read_text().split())
    assert (
        "reached 99 % of the blocks, or preempted a request, or kept requests waiting after a tenth of the steps"
        in page
    )
    assert "waited a quarter longer" in page
    assert (sweep_report.FULL, sweep_report.QUEUED, sweep_report.PATIENCE) == (99.0, 0.1, 1.25)
