"""Benchmarks: rounds interleave, ratios are round by round, and wrong tokens get no speed-up."""

import json
from pathlib import Path

import pytest
import torch

from treewy.bench.engine import NONE, STOCK, Setting, engine_variants, measure, read_shape
from treewy.bench.environment import environment
from treewy.bench.timing import Spread, interleave, ratio
from treewy.cli.main import main
from treewy.draft import Budget
from treewy.engine import SamplingParams
from treewy.errors import RequestError
from treewy.hf.checkpoint import SHIPPED, load_model, load_tokenizer
from treewy.tree import DraftTree

PROMPT_LINE = "The sea was calm"
QUICK = ("--rounds", "1", "--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu")


def test_every_round_runs_every_variant_and_starts_with_the_next() -> None:
    order: list[str] = []
    advanced = []
    results = interleave(
        {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}, 4, lambda: advanced.append(1)
    )
    assert "".join(order) == "abcbcacababc"
    assert results == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}
    assert len(advanced) == 12


def test_no_rounds_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one round; got 0"):
        interleave({"a": lambda: 1}, 0)


def test_spreads_and_ratios() -> None:
    """A ratio is the median of each round's own, not of the medians: 4/2, 9/3, 1/1."""
    a, b = Spread.of([4.0, 9.0, 1.0]), Spread.of([2.0, 3.0, 1.0])
    assert a == Spread(4.0, 1.0, 9.0, [4.0, 9.0, 1.0])
    assert ratio(a, b) == Spread(2.0, 1.0, 3.0, [2.0, 3.0, 1.0])


def test_shapes() -> None:
    assert read_shape("chain:2") == DraftTree.chain(2)
    assert read_shape("tree:2,1") == DraftTree.from_widths([2, 1])
    assert read_shape("best:9x4") == Budget(9, 4)
    for bad in ("chain:x", "ring:3", "tree:", "3;3", "best:x"):
        with pytest.raises(RequestError, match=r"(positive widths|as in chain:3|A budget)"):
            read_shape(bad)


def test_the_environment_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEWY_SHA", "abc")
    monkeypatch.setattr("sys.argv", ["/somewhere/private/treewy", "bench", "engine"])
    got = environment("cpu", seed=3)
    assert (got["sha"], got["dirty"], got["seed"]) == ("abc", None, 3)
    assert got["argv"] == ["treewy", "bench", "engine"]
    assert got["device"].startswith("cpu")
    assert {"torch", "transformers", "python"} <= got["versions"].keys()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_variants_are_held_against_no_drafts(batch_size: int) -> None:
    model, tokenizer = load_model(SHIPPED, torch.float32, "cpu"), load_tokenizer(SHIPPED)
    options = {
        "draft": "mtp",
        "draft_model": None,
        "shapes": ["chain:2", "tree:2,2"],
        "commits": ["reconstruct", "store_all"],
    }
    engines = engine_variants(model, SHIPPED, tokenizer, max_num_seqs=batch_size, **options)
    assert list(engines) == [NONE] + [f"{s}, {c}" for s in options["shapes"] for c in options["commits"]]
    prompts = [list(tokenizer.encode(text)) for text in ("The sea was", "She read the letter", "def f(x):")]
    setting = Setting(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True), batch_size, 2)
    passes = []
    results = measure(engines, model if batch_size == 1 else None, setting, lambda: passes.append(1))
    assert len(passes) == 2 * (5 + (batch_size == 1))
    assert set(results) == {*engines, *([STOCK] if batch_size == 1 else [])}
    for name, x in results.items():
        assert x.equal is True
        assert x.first_diff is None
        assert len(x.tokens_per_s.rounds) == 2
        assert x.tokens_per_s.median > 0
        assert (x.over_none is None) == (name == NONE)
        if name not in (NONE, STOCK):
            assert x.mean_accept_len > 1
            assert x.state_bytes > results[NONE].state_bytes
    assert results["tree:2,2, store_all"].state_bytes > results["tree:2,2, reconstruct"].state_bytes


def test_json_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT_LINE + "\n\n" + r"def f(x):\n    return")
    assert main(["bench", "engine", "--shapes", "chain:2", "--prompts", str(prompts), "--json", *QUICK]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["setting"]["num_prompts"] == 2
    assert set(report["variants"]) == {"no drafts", "chain:2, reconstruct", "transformers"}
    drafted = report["variants"]["chain:2, reconstruct"]
    assert drafted["equal"] is True
    assert len(drafted["over_transformers"]["rounds"]) == 1


def test_the_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "engine", "--shapes", "tree:3,3,3", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(name in out for name in ("no drafts", "tree:3,3,3, reconstruct", "transformers", "x stock"))


def test_sampling_leaves_equality_open_and_stock_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--shapes", "chain:2", "--temperature", "0.8", "--json", *QUICK]) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert set(variants) == {"no drafts", "chain:2, reconstruct"}
    assert all(x["equal"] is None for x in variants.values())


def test_wrong_tokens_get_no_speed_up_and_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that decodes something else may be fast; the table shows no ratio, and the command fails."""
    from treewy.hf.stock import Stock

    monkeypatch.setattr("treewy.bench.engine.stock_generate", lambda *_: Stock([1, 2, 3], 1e6))
    assert main(["bench", "engine", "--shapes", "chain:2", *QUICK]) == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.out.splitlines() if line.strip().startswith("transformers")]
    assert line.split()[-1] == "no"
    assert len(line.split()) == 4
    assert "transformers did not" in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "at least 1; got 0"),
        (["--batch-size", "0"], "at least 1; got 0"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
        (["--shapes", "star:3"], "star:3"),
        (["--max-new-tokens", "7"], "at least 8; got 7"),
        (["--draft", "model"], "--draft-model go together"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["bench", "engine", *arguments]) == 2
    assert said in capsys.readouterr().err
