"""`treewy bench ops` from the command line, on a machine that may have no GPU."""

import json
from typing import get_args

import pytest
import torch

from bench.ops_tools import Clock, eager, setting
from treewy.bench.ops import NAMES
from treewy.cli.bench_ops import BenchOps, RowName
from treewy.cli.main import main


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "ops"]) == 1
    assert "Ops must be timed on a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "speed"], "'speed'"),
        (["--rows"], "at least one of verify"),
        (["--rows", "trees", "--batch-sizes", "1", "8"], "trees has none among"),
        (["--batch-sizes", "0"], "at least 1; got [0]"),
        (["--batch-sizes"], "at least 1; got []"),
        (["--backend", "eager"], "Only kernels can be captured"),
        (["--backend", "metal"], "'metal'"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
        (["--plot", "x.png", "--rows", "drift"], "must have times over trees"),
        (["--shapes", "chain:3"], "--shapes"),
    ],
)
def test_bad_usage(capsys, arguments, said):
    assert main(["bench", "ops", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_options_of_the_other_benchmark_are_refused_and_help_is_where_it_says(capsys):
    assert main(["bench", "engine", "--quick"]) == 2
    assert "See: treewy bench engine --help" in capsys.readouterr().err
    assert main(["bench", "star"]) == 2
    assert "engine, ops" in capsys.readouterr().err
    assert main(["bench", "ops", "--help"]) == 0
    assert "--batch-sizes" in capsys.readouterr().out


def test_every_row_has_a_name_on_the_command_line():
    assert get_args(RowName) == NAMES


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let the command run here, on two sets of operands, with a clock that says 7 us and then 8."""

    def use(entry):
        monkeypatch.setattr("treewy.bench.ops.require_gpu", lambda: torch.device("cpu"))
        monkeypatch.setattr("treewy.bench.ops.problems.num_sets", lambda _: 2)
        monkeypatch.setattr(BenchOps, "_setting", lambda self: setting(entry, Clock(7.0, 8.0), with_peers=self.peers))

    return use


ONE = ["bench", "ops", "--rows", "verify", "--batch-sizes", "1"]


def test_json_lines(capsys, on_a_cpu):
    on_a_cpu(eager)
    assert main([*ONE, "--json"]) == 0
    first, ours, peer = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["benchmark"] == "ops"
    assert {"sha", "dirty", "argv", "versions", "device"} <= first["environment"].keys()
    assert ours["us"]["rounds"] == [7.0] * 3
    assert ours["errors"]["o"] < 1e-2
    assert peer["us"] is None
    assert "importable" in peer["note"]


def test_the_table(capsys, on_a_cpu):
    on_a_cpu(eager)
    assert main([*ONE, "--no-peers"]) == 0
    out = capsys.readouterr().out
    assert "7.0 (7.0-7.0)" in out
    assert "FlashInfer" not in out


def test_a_wrong_kernel_fails_the_command_after_the_report(capsys, on_a_cpu):
    def wrong(*args, **options):
        out = eager(*args, **options)
        out.o.add_(1)
        return out

    on_a_cpu(wrong)
    assert main([*ONE, "--no-peers"]) == 1
    captured = capsys.readouterr()
    assert "wrong: relative errors o" in captured.out
    assert "must run and be right to be timed; 1 did not" in captured.err
