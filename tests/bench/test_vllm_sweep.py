"""The sweep's command, its engine and its options, over a stand-in for vLLM."""

import argparse
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in_vllm
import vllm_engine
import vllm_sweep
from serving import Clock, Gain, Load
from vllm_model import capacity, counters, drafting, make_engine, model_config, shape, token_ids
from workload import Lengths


def sweep_options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vllm_sweep.py", *arguments])
    return vllm_sweep.options()


def engine_options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py", *arguments])
    return vllm_engine.options()


def made(monkeypatch, tmp_path, given, largest=256):
    stand_in_vllm.install(monkeypatch)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    llm = make_engine(given, str(tmp_path), largest)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    # The scheduler is asked in this process.
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    return llm


def test_the_engine_of_a_chain(monkeypatch, tmp_path):
    given = engine_options(monkeypatch, "--commit", "reconstruct", "--utilisation", "0.75")
    arguments = made(monkeypatch, tmp_path, given).arguments
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [4 * count for count in (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))]
    assert (min(sizes), max(sizes)) == (4, 1024)
    assert (arguments["max_num_seqs"], arguments["gpu_memory_utilization"]) == (256, 0.75)
    assert "async_scheduling" not in arguments
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == len(config["text_config"]["layer_types"]) == 40
    assert config["text_config"]["layer_types"].count("full_attention") == 10
    assert config["text_config"]["hidden_size"] == config["vision_config"]["out_hidden_size"] == 2048
    assert config["image_token_id"] > token_ids(given)[1]


def test_the_engine_of_a_dense_model(monkeypatch, tmp_path):
    given = engine_options(monkeypatch, "--model", "qwen3.5-27b")
    made(monkeypatch, tmp_path, given)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["model_type"] == config["vision_config"]["model_type"] == "qwen3_5"
    text = config["text_config"]
    assert (text["model_type"], text["hidden_size"], len(text["layer_types"])) == ("qwen3_5_text", 5120, 64)
    assert "num_experts" not in text


@pytest.mark.parametrize(("said", "variable", "want"), [("1", "1", "0"), ("2", "0", "1"), (None, "0", "0")])
def test_the_runner_is_what_the_option_says_or_else_the_variable(monkeypatch, tmp_path, said, variable, want):
    given = engine_options(monkeypatch, *(["--runner", said] if said else []))
    stand_in_vllm.install(monkeypatch)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    make_engine(given, str(tmp_path), 256)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == want


def test_tiny_models_are_of_their_kind(monkeypatch):
    sizes = {
        name: model_config(engine_options(monkeypatch, "--tiny", "--model", name, "--layers", "4"))["text_config"]
        for name in ("qwen3.5-35b-a3b", "qwen3.5-9b")
    }
    assert [text.get("num_experts") for text in sizes.values()] == [4, None]
    assert [text.get("intermediate_size") for text in sizes.values()] == [None, 256]
    assert {(text["hidden_size"], text["num_hidden_layers"]) for text in sizes.values()} == {(128, 4)}


def test_records_say_of_which_model_they_are():
    """The first ones named none."""
    assert (
        shape({"layers": 40})
        == shape({"model": "qwen3.5-35b-a3b", "layers": None})
        == "Qwen3.5-35B-A3B shape, 40 layers"
    )
    assert shape({"model": "qwen3.5-27b", "layers": 8}) == "Qwen3.5-27B shape, 8 layers"
    assert shape({"tiny": True, "layers": 4}) == "a tiny model"
    assert shape({"layers": 8, "compiled": True, "runner": 1}).endswith("shape, 8 layers, compiled, first runner")
    assert shape({"layers": 8, "compiled": False, "runner": 2}) == shape({"layers": 8})


def test_a_compiled_engine_is_as_vllm_makes_it(monkeypatch, tmp_path):
    given = engine_options(monkeypatch, "--compiled")
    assert made(monkeypatch, tmp_path, given).arguments["compilation_config"].keys() == {"cudagraph_capture_sizes"}


def test_the_engine_of_a_tree(monkeypatch, tmp_path):
    given = engine_options(monkeypatch, "--commit", "ring", "--widths", "3,3,3", "--acceptance", "3.58")
    arguments = made(monkeypatch, tmp_path, given, largest=8).arguments
    assert arguments["speculative_config"]["num_speculative_tokens"] == 3 + 9 + 27
    assert arguments["speculative_config"]["synthetic_acceptance_length"] == 3.58
    treewy = {"mamba_state_commit": "ring", "draft_tree_widths": [3, 3, 3]}
    assert arguments["additional_config"] == {"gdn_prefill_backend": "triton", "treewy": treewy}
    assert arguments["compilation_config"]["cudagraph_capture_sizes"] == [40, 80, 160, 320]


def test_engines_that_are_vllm_as_it_is(monkeypatch, tmp_path):
    snapshots = drafting(engine_options(monkeypatch, "--commit", "store_all"))
    assert snapshots["additional_config"] == {"gdn_prefill_backend": "triton"}
    assert snapshots["speculative_config"]["num_speculative_tokens"] == 3
    given = engine_options(monkeypatch, "--commit", "none")
    assert "speculative_config" not in drafting(given)
    arguments = made(monkeypatch, tmp_path, given, largest=8).arguments
    assert arguments["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8]


def test_drafts_may_earn_what_they_earn(monkeypatch):
    config = drafting(engine_options(monkeypatch, "--acceptance", "0"))["speculative_config"]
    assert config == {"method": "mtp", "num_speculative_tokens": 3}


def test_a_tiny_model_has_no_special_tokens_in_its_prompts(monkeypatch):
    given = engine_options(monkeypatch, "--tiny", "--layers", "4")
    config = model_config(given)
    assert config["image_token_id"] >= token_ids(given)[1]
    assert config["video_token_id"] < config["text_config"]["vocab_size"] == 512
    assert config["vision_config"]["out_hidden_size"] == config["text_config"]["hidden_size"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--commit", "store_all", "--widths", "3,3"), "--widths need --commit reconstruct or ring; got store_all"),
        (("--concurrency", "8", "300"), "up to --max-num-seqs 256; got 300"),
        (("--concurrency", "8", "0"), "must be above 0; got 0"),
        (("--rate", "-1"), "must be above 0; got -1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        sweep_options(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_the_engine_is_driven_as_vllm_wants(monkeypatch):
    stand_in_vllm.install(monkeypatch)
    llm = stand_in_vllm.LLM()
    served = vllm_sweep.Served(llm, (10, 200))
    served.add("a", Lengths(5, 6), np.random.default_rng(0))
    ((name, prompt, sampling),) = llm.llm_engine.added
    assert (name, prompt["type"], len(prompt["prompt_token_ids"])) == ("a", "token", 5)
    assert all(isinstance(token, int) and 10 <= token < 200 for token in prompt["prompt_token_ids"])
    wanted = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    assert sampling == wanted | {"output_kind": stand_in_vllm.Kind.DELTA}
    assert served.step() == [Gain("a", 4, False)]
    assert served.load() == Load(0.25, 1, 3)
    assert served.step() == [Gain("a", 2, True)]
    assert served.counters() == {name: llm.metrics[name] for name in llm.metrics if name != "other"} == counters(llm)
    served.add("b", Lengths(5, 60), np.random.default_rng(0))
    served.abort(["b"])
    assert not llm.llm_engine.requests
    assert capacity(llm) == {"num_blocks": 622, "block_size": 1072}


class Ticks:
    """A clock that goes on by itself, a little with every look."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.01
        return self.time


def points(monkeypatch, *arguments):
    stand_in_vllm.install(monkeypatch)
    given = sweep_options(monkeypatch, *arguments, "--ramp", "0.5", "--seconds", "2")
    llm, ticks = stand_in_vllm.LLM(), Ticks()

    def sleep(seconds):
        ticks.time += seconds

    rows = list(vllm_sweep.sweep(vllm_sweep.Served(llm, token_ids(given)), given, Clock(ticks.now, sleep)))
    assert not llm.llm_engine.requests
    return rows, [name for name, *_ in llm.llm_engine.added]


def test_a_row_per_point_that_says_all_of_itself(monkeypatch):
    rows, names = points(monkeypatch, "--commit", "reconstruct", "--concurrency", "1", "4", "--utilisation", "0.9")
    assert [row["concurrency"] for row in rows] == [1, 4]
    for row in rows:
        about = {name: row[name] for name in ("row", "commit", "widths", "utilisation", "arrivals", "mix", "seed")}
        assert about == {
            "row": "point",
            "commit": "reconstruct",
            "widths": None,
            "utilisation": 0.9,
            "arrivals": "closed",
            "mix": "sharegpt",
            "seed": 0,
        }
        assert row["peak_kv_percent"] == 25 * row["concurrency"]
        assert row["output_tokens_per_s"] > 0
    # The warm-up: the highest level, under a seed of its own.
    assert names[0] == "closed-4-1-0"
    assert {name.rsplit("-", 1)[0] for name in names} == {"closed-4-1", "closed-1-0", "closed-4-0"}


def test_points_of_requests_that_come_by_themselves(monkeypatch):
    rows, names = points(monkeypatch, "--rate", "2", "8.5", "--warm", "0", "--seed", "5")
    assert [(row["rate"], row["arrivals"]) for row in rows] == [(2.0, "poisson"), (8.5, "poisson")]
    assert {name.rsplit("-", 1)[0] for name in names} == {"poisson-2-5", "poisson-8.5-5"}


def test_one_engine_meets_both_kinds_of_load(monkeypatch):
    rows, names = points(monkeypatch, "--concurrency", "4", "2", "--rate", "8.5")
    assert [(row["arrivals"], row.get("concurrency"), row.get("rate")) for row in rows] == [
        ("closed", 4, None),
        ("closed", 2, None),
        ("poisson", None, 8.5),
    ]
    assert names[0] == "closed-4-1-0"


def test_the_command_prints_json_lines_and_appends_them(monkeypatch, tmp_path, capsys):
    stand_in_vllm.install(monkeypatch)
    file = tmp_path / "sweep.jsonl"
    file.write_text("{}\n")
    short = ("--ramp", "0", "--seconds", "0.01", "--warm", "0")
    monkeypatch.setattr(sys, "argv", ["vllm_sweep.py", "--tiny", "--concurrency", "2", "--json", str(file), *short])
    monkeypatch.setattr(vllm_sweep.os, "_exit", lambda code: None)
    vllm_sweep.main()
    lines = capsys.readouterr().out.splitlines()
    assert file.read_text().splitlines() == ["{}", *lines]
    header, start, point = map(json.loads, lines)
    assert header["benchmark"] == "vllm sweep"
    assert header["options"]["concurrency"] == [2]
    assert {"sha", "argv", "versions", "device", "seed"} <= header["environment"].keys()
    assert (start["row"], start["num_blocks"], start["async_scheduling"]) == ("start", 622, True)
    assert (point["row"], point["block_size"], point["concurrency"]) == ("point", 1072, 2)


def test_runs_that_leave_no_decoding_are_no_result(monkeypatch):
    stand_in_vllm.install(monkeypatch)
    monkeypatch.setattr(vllm_engine, "run", lambda engine, given, count, tokens: 1.0)
    given = argparse.Namespace(commit="none", tiny=True, prompt=8, output=12, rounds=1, seconds=0.0)
    with pytest.raises(SystemExit, match=r"A run of 12 tokens must take longer.*--output"):
        vllm_engine.measure(stand_in_vllm.LLM(), given, 5)


def test_an_output_that_is_no_longer_than_what_is_taken_away_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        engine_options(monkeypatch, "--output", "8")
    assert "--output must be above 8" in capsys.readouterr().err


@pytest.mark.parametrize(("least", "least_seconds", "rounds"), [(2, 0.0, 2), (1, 9.0, 3), (3, 4.0, 3)])
def test_one_engine_at_some_numbers_of_requests(monkeypatch, least, least_seconds, rounds):
    """vllm_engine.py: what is left of a run when a short one is taken away is decoding."""
    stand_in_vllm.install(monkeypatch)
    given = argparse.Namespace(commit="none", tiny=True, prompt=8, output=48, rounds=least, seconds=least_seconds)
    seconds = {8: 1.0, 48: 3.0}
    now = SimpleNamespace(time=0.0)

    def generate(prompts, sampling, use_tqdm):
        assert len(prompts) == 5
        assert all(len(prompt["prompt_token_ids"]) == 8 for prompt in prompts)
        now.time += seconds[sampling["max_tokens"]]

    llm = stand_in_vllm.LLM()
    llm.generate = generate
    monkeypatch.setattr(vllm_engine.time, "perf_counter", lambda: now.time)
    row = vllm_engine.measure(llm, given, 5)
    assert (row["decode_tokens_per_s"], row["tokens_per_s"]) == (5 * 40 / 2, 5 * 48 / 3)
    assert [one["counters"]["num_preemptions"] for one in row["rounds"]] == [0] * rounds
