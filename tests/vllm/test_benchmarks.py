"""The benchmark's sweep runs with real vLLM: a tiny model, and two loads."""

import json
import subprocess
import sys
from pathlib import Path

import engine

SWEEP = Path(__file__).parent.parent.parent / "benchmarks" / "vllm_sweep.py"
ARGUMENTS = "--tiny --layers 4 --max-model-len 512 --acceptance 0 --max-num-seqs 4 --warm 0 --ramp 1 --seconds 3"


def test_the_sweep_measures_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    command = [sys.executable, str(SWEEP), *ARGUMENTS.split(), "--concurrency", "1", "4", "--json", str(file)]
    done = subprocess.run(
        command,
        env=engine.environment(engine.Run(model="", rounds=[])),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "treewy: reconstruct, 3 drafts" in done.stdout + done.stderr
    header, start, *rows = map(json.loads, file.read_text().splitlines())
    assert header["options"]["commit"] == "reconstruct"
    assert start["num_blocks"] > 100
    assert [(row["concurrency"], row["peak_running"], row["peak_waiting"]) for row in rows] == [(1, 1, 0), (4, 4, 0)]
    for row in rows:
        assert 3 <= row["seconds"] < 4
        # Steps bring at most four tokens a request, and hardly ever those of prompts alone.
        assert row["steps"] / 2 < row["output_tokens_per_s"] * row["seconds"] <= 4 * row["steps"] * row["concurrency"]
        assert 0 < row["peak_kv_percent"] < 5
        assert 1 <= row["accepted_per_step"] <= 4
        assert row["preemptions"] == row["queued_share"] == 0
