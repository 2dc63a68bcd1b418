"""`treewy plan`: the figures scripts depend on, the table people read, and what bad input gets."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from treewy.cli.main import main
from treewy.hf.checkpoint import SHIPPED

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PARTS = {"state", "conv", "kv", "draft_kv", "stash", "snapshots"}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("model", "state", "kv"), [("qwen3.5-35b-a3b", 30, 640), ("qwen3.5-397b-a17b", 90, 960)])
def test_figures_that_must_hold(capsys: pytest.CaptureFixture[str], model: str, state: int, kv: int) -> None:
    """The published sizes of both models at 32,768 tokens, with a chain of 3 and with a tree of 39."""
    common = ("--model", model, "--gpu", "h200", "--context", "32768")
    narrow = run_json(capsys, *common, "--chain", "3", "--state-dtype", "bfloat16")
    assert narrow.keys() >= {"per_sequence", "weights_bytes", "fits", "regime", "advice", "vllm"}
    part = narrow["per_sequence"]
    assert part.keys() >= PARTS
    assert (part["state"], part["kv"], part["snapshots"]) == (state * MIB, kv * MIB, 4 * state * MIB)
    wide = run_json(capsys, *common, "--chain", "3", "--state-dtype", "float32")["per_sequence"]
    assert (wide["state"], wide["snapshots"]) == (2 * state * MIB, 8 * state * MIB)
    tree = run_json(capsys, *common, "--tree", "3,3,3", "--state-dtype", "bfloat16")["per_sequence"]
    assert tree["snapshots"] == 40 * state * MIB
    assert set(narrow["fits"]) == {"none", "store_all", "reconstruct", "ring"}
    assert all(isinstance(count, int) for count in narrow["fits"].values())


def test_defaults_and_the_checkpoints_own_state_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """A chain of 3 on an h200 at 32,768 tokens, states as the checkpoint asks."""
    result = run_json(capsys, "--model", "qwen3.5-35b-a3b")
    assert result["gpu"]["name"] == "h200"
    assert result["state_dtype"] == "float32"
    assert result["per_sequence"]["snapshots"] == 240 * MIB
    assert result["per_sequence"]["kv"] == 640 * MIB


def test_every_option_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--tp 2 --gpu 100 --dtype float32 --requests 5 --memory-fraction 0.5 --reserve 1.5 --ring-capacity 4"
    result = run_json(capsys, "--model", "qwen3.5-4b", "--context", "100", *options.split())
    assert result["setting"] == {
        "rows": 4,
        "context": 100,
        "tp": 2,
        "dtype": "float32",
        "state_dtype": None,
        "requests": 5,
        "memory_fraction": 0.5,
        "reserve_gib": 1.5,
        "ring_capacity": 4,
    }
    assert result["gpu"]["memory_bytes"] == 100 << 30
    assert result["regime"] == "not memory-bound"


def test_a_checkpoint_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures that `treewy generate` reports for it."""
    plan = run_json(capsys, "--model", str(SHIPPED), "--dtype", "float32", "--tree", "3,3,3", "--context", "7")
    arguments = ["generate", "It was", "--dtype", "float32", "--tree", "3,3,3", "--json", "--max-new-tokens", "8"]
    assert main(arguments) == 0
    generated = json.loads(capsys.readouterr().out)
    part = plan["per_sequence"]
    assert generated["state_bytes"] == part["state"] + part["stash"] - part["conv_inputs"]
    assert generated["conv_bytes"] == part["conv"] + part["conv_inputs"]


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault J06: what weights and sequences take, part by part, and how many requests fit."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--model", "qwen3.5-35b-a3b", "--context", "4096"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    rows = {line[:26].strip(): line[26:].split() for line in shown.splitlines()}
    assert rows["recurrent states"] == ["60.00", "MiB"] * 4
    assert rows["pending states"] == ["240.00", "MiB"]
    assert rows["pending records"] == ["2.84", "MiB"] * 2
    plan = run_json(capsys, "--model", "qwen3.5-35b-a3b", "--context", "4096")
    assert rows["requests that fit"] == [str(count) for count in plan["fits"].values()]
    assert rows["by vLLM's blocks"] == [str(blocks["requests"]) for blocks in plan["vllm"].values()]
    assert f"Regime: {plan['regime']}." in shown
    assert plan["advice"] in " ".join(shown.split())


def test_a_column_of_the_table_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault J06: every part of a sequence has a line of its own, and nothing is left out."""
    from treewy.cli.plan import HELD_BY

    plan = run_json(capsys, "--model", "qwen3.5-27b", "--tree", "2,2")
    figures = plan["per_sequence"] | {"records": plan["per_sequence"]["stash"] - plan["per_sequence"]["conv_inputs"]}
    assert {policy: sum(figures[part] for part in parts) for policy, parts in HELD_BY.items()} == plan["totals"]


def test_the_table_without_room_for_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3.5-397b-a17b", "--gpu", "h200", "--tp", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 x h200, each" in shown
    assert "Regime: weights do not fit." in shown
    assert "vLLM" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "qwen3.5-35"], "Did you mean qwen3.5-35b-a3b?"),
        (["--model", "qwen3.5-4b", "--gpu", "h20"], "Did you mean h200?"),
        (["--model", "qwen3.5-4b", "--gpu", "-5"], "GiB"),
        (["--model", "qwen3.5-4b", "--tp", "3"], "tp 3"),
        (["--model", "qwen3.5-4b", "--tp", "0"], "tp 0"),
        (["--model", "qwen3.5-4b", "--context", "0"], "context"),
        (["--model", "qwen3.5-4b", "--requests", "0"], "requests"),
        (["--model", "qwen3.5-4b", "--chain", "3", "--tree", "3"], "Only one of tree and chain"),
        (["--model", "qwen3.5-4b", "--chain", "-1"], "A chain must have"),
        (["--model", "qwen3.5-4b", "--tree", "3,x"], "positive widths"),
        (["--model", "qwen3.5-4b", "--state-dtype", "float8"], "float8"),
        (["--model", "qwen3.5-4b", "--dtype", "int4"], "int4"),
        (["--model", "qwen3.5-4b", "--memory-fraction", "2"], "memory fraction"),
        (["--model", "qwen3.5-4b", "--reserve", "-1"], "reserve"),
        (["--model", "qwen3.5-4b", "--quantise"], "--quantise"),
        (["--model", "/nosuch/folder"], "/nosuch/folder"),
        ([], "DIR_OR_HUB_ID_OR_PRESET"),
    ],
)
def test_bad_requests_get_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("treewy: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_model_without_linear_layers_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["plan", "--model", str(tmp_path)]) == 1
    assert "'llama'" in capsys.readouterr().err


def test_it_starts_without_torch() -> None:
    """Nor transformers: sizes are plain JSON. NumPy comes with the tree."""
    code = (
        "import sys; from treewy.cli.main import main\n"
        "assert main(['plan', '--model', 'qwen3.5-35b-a3b', '--tree', '3,3,3']) == 0\n"
        f"assert main(['plan', '--model', {str(SHIPPED)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/planning.md"])
def test_the_output_that_the_documents_show_is_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    """A block that begins with `$ treewy plan` shows what the command prints."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.findall(r"^```text\n\$ (treewy plan.*)\n((?:.|\n)*?)^```", (ROOT / document).read_text(), flags=re.M)
    assert shown
    for command, output in shown:
        assert main(shlex.split(command)[1:]) == 0
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--context", "9" * 400, "context must be at most"),
        ("--ring-capacity", "9" * 400, "ring capacity must be at most"),
        ("--reserve", "1e308", "reserve must be 0 to 1048576 GiB; got 1e[+]308"),
    ],
)
def test_figures_beyond_any_memory(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback out of the arithmetic."""
    assert main(["plan", "--model", "qwen3.5-0.8b", option, value]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_layer_types_that_are_no_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": [["a"], "b"]}
    config |= {"vocab_size": 8, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "layer_types must name 2 layers" in capsys.readouterr().err


def test_a_benchmark_of_no_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--commits"]) == 2
    assert "commits and shapes must name at least one" in capsys.readouterr().err
