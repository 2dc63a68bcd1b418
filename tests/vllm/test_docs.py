"""docs/vllm.md runs: its Python on a tiny model and for fewer tokens, its commands as far as a configuration."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine import Run, environment

PAGE = (Path(__file__).parent.parent.parent / "docs" / "vllm.md").read_text()
NAMED = "Qwen/Qwen3.5-35B-A3B"
GENERATES, WATCHES, CHECKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
COMMANDS = [shlex.split(line)[2:] for line in PAGE.splitlines() if line.startswith("vllm serve ")]
# What `vllm serve` does with its flags before it starts anything.
CONFIGURES = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
for flags in json.loads(sys.argv[1]):
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    print("made", json.dumps(arguments.create_engine_config().additional_config))
"""


def run(folder: Path, code: str, model: str, *arguments: str, **variables: str) -> str:
    """Return what a script prints on the second runner of the tests' vLLM."""
    script = folder / "script.py"
    script.write_text(code.replace(NAMED, model).replace("max_tokens=64", "max_tokens=12"))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment(Run(model=model, runner="v2", rounds=[])) | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example(model: Callable[..., str], tmp_path: Path) -> None:
    """With an engine in a process of its own, as users have it. The dummy steps of 128 requests would take the longest."""
    code = GENERATES.replace("max_num_seqs=128", "max_num_seqs=4")
    printed = run(tmp_path, code, model("dense"), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert len(re.findall(r"Worker pid.*treewy: reconstruct, 3 drafts", printed)) == 1
    assert "4 x 4 kept rows" in printed


def test_commands_and_the_example_of_the_check(model: Callable[..., str], tmp_path: Path) -> None:
    tiny = model("dense")
    flags = [["--model", *(tiny if word == NAMED else word for word in words)] for words in COMMANDS]
    printed = run(tmp_path, CONFIGURES + CHECKS + WATCHES, tiny, json.dumps(flags)).splitlines()
    made = [json.loads(line.removeprefix("made ")) for line in printed if line.startswith("made ")]
    assert made == [
        {"treewy": {"mamba_state_commit": "reconstruct"}},
        {"treewy": {"mamba_state_commit": "ring", "ring_capacity": 8}},
        {"treewy": {"mamba_state_commit": "reconstruct", "draft_tree_widths": [2, 2, 2]}},
    ]
    [report] = ast.literal_eval(printed[-2])
    assert report["num_checks"] > 10
    assert report["largest"] < 1e-6
    counted = ast.literal_eval(printed[-1])
    assert counted["num_drafts"] == sum(counted["accept_lengths"]) > 5
    assert counted["num_folds"] == counted["num_steps"] - 1  # of one request: before every step but its first
