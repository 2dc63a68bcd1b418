"""Runs a vLLM engine in a fresh process, from a description, and reports what it did.

vLLM is configured by environment variables that it reads when imported, and keeps state per process. So every description
gets a process; what an engine can be asked one after the other is a list of rounds in one description.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

HERE = Path(__file__).parent
INTERPRETER = Path(sys.prefix) / "triton_interp"

# What every engine of these tests runs under.
EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process: fast, and a probe sees the worker
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ENVIRONMENT = EVERYWHERE | {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TORCH_COMPILE_DISABLE": "1",  # compiling a few of vLLM's small functions takes longer than all else
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines at a time would share the first core
}
ARGUMENTS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a round.

    Attributes:
        prompt: Token ids, or text.
        sampling: Arguments of `vllm.SamplingParams`; greedy, 16 tokens and no early end where they say nothing.
        joins: The engine step of its round before which it is added.
        aborts: The engine step before which it is aborted, if any.
        continues: An earlier round and the place of a request there, whose prompt and output come before this prompt.
        keeps: How many tokens of that output come, if not all.
        priority: Where an engine is scheduled by it: lower ones go first.
    """

    prompt: list[int] | str
    sampling: dict[str, Any] = field(default_factory=dict)
    joins: int = 0
    aborts: int | None = None
    continues: tuple[int, int] | None = None
    keeps: int | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: an engine, and rounds of requests that it serves one after the other.

    Attributes:
        model: Folder of the checkpoint.
        rounds: The requests of each round. A round ends when all of its requests have.
        resets: Rounds before which the prefix cache is emptied.
        runner: "v1" as vLLM's CPU build has it, or "v2", its model runner for GPUs, with Triton's interpreter.
        speculative: `speculative_config`; see `mtp`.
        arguments: Further arguments of `vllm.LLM`, over `ARGUMENTS`: `additional_config`, `num_gpu_blocks_override`,
            `max_num_seqs`, `max_num_batched_tokens`, ...
        plugin: Whether treewy's plugin is loaded.
        prepare: "module:function" names, called without arguments in the process before vLLM is imported.
        probe: "module:function", called with the worker when the engine stands. It returns a function of no arguments;
            that is called after every round, and what it returns is the round's `probed`, by way of JSON.
        environment: Variables over `ENVIRONMENT`; None takes one away.
        gpus: How many it runs on; 0 for vLLM's CPU build. Processes of pytest-xdist that want one take turns.
    """

    model: str
    rounds: list[list[Request]]
    resets: list[int] = field(default_factory=list)
    runner: Literal["v1", "v2"] = "v1"
    speculative: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    plugin: bool = True
    prepare: list[str] = field(default_factory=list)
    probe: str | None = None
    environment: dict[str, str | None] = field(default_factory=dict)
    gpus: int = 0


class Output(NamedTuple):
    """What a request got.

    Attributes:
        tokens: Token ids.
        text: The same as text.
        reason: Why it ended: "length", "stop", "abort", ...
        gains: How many tokens came with each engine step that brought any.
        logprobs: For each token those asked for, by token id; None if none were.
        prompt_logprobs: The same for each token of the prompt but the first.
        cached: How many tokens of its prompt were found in the prefix cache. vLLM 0.26 counts it right where steps are scheduled
            ahead, unlike `prefix_cache_hits`.
    """

    tokens: list[int]
    text: str
    reason: str | None
    gains: list[int]
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float]] | None
    cached: int | None


class Round(NamedTuple):
    """What a round brought.

    Attributes:
        outputs: One per request, in their order.
        counters: How far vLLM's counters went, without their prefix: `spec_decode_num_drafts`,
            `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens`, `spec_decode_num_accepted_tokens_per_pos`
            (a list), `num_preemptions`, ... And of the plugin's histograms the cumulative counts of their buckets.
        steps: Engine steps.
        seconds: Of all of them.
        probed: What the probe returned.
    """

    outputs: list[Output]
    counters: dict[str, Any]
    steps: int
    seconds: float
    probed: Any

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of every request."""
        return [output.tokens for output in self.outputs]


class Report(NamedTuple):
    """What a process reports.

    Attributes:
        rounds: One per round asked for.
        runner: Module of the model runner.
        num_blocks: Blocks of the KV cache.
        start_seconds: From the first line of the process until the engine stands.
        log: Everything the process printed.
    """

    rounds: list[Round]
    runner: str
    num_blocks: int
    start_seconds: float
    log: str

    def lines(self, pattern: str) -> list[str]:
        """Return the lines of the log in which a pattern is found."""
        return [line for line in self.log.splitlines() if re.search(pattern, line)]


class EngineError(Exception):
    """A process failed: why, and everything it printed. The message is the end of that and the reason."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason, log)
        self.reason, self.log = reason, log

    def __str__(self) -> str:
        return "\n".join([*self.log.splitlines()[-40:], self.reason])


def mtp(drafts: int, *, accepted: list[float] | None = None, **options: object) -> dict[str, Any]:
    """Return a `speculative_config` that drafts from the checkpoint's head.

    Args:
        drafts: Draft tokens a step.
        accepted: Synthetic acceptance: the share of steps in which each draft is accepted, whatever it is (v2 only).
        options: Further entries.
    """
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": drafts}
    if accepted is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": accepted}
    return config | options


def environment(run: Run) -> dict[str, str]:
    """Return the environment of a run's process."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if run.runner == "v2" else "0"}
    variables = os.environ | (EVERYWHERE | _devices(run.gpus) if run.gpus else ENVIRONMENT) | runner
    path = [variables.get("PYTHONPATH", ""), str(HERE.parent)]
    if run.runner == "v2" and not run.gpus:
        path.append(str(INTERPRETER))
        variables["TRITON_INTERPRET"] = "1"
    if not run.plugin:
        variables["VLLM_PLUGINS"] = ""
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return {name: value for name, value in (variables | run.environment).items() if value is not None}


def _devices(count: int) -> dict[str, str]:
    """Return which GPUs a process sees: one in turn, or as many as it wants."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    seen = range(count) if count > 1 else [process % torch.cuda.device_count()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}


def execute(run: Run, *, timeout: float | None = None) -> Report:
    """Run a description to its end.

    Args:
        run: The description.
        timeout: Seconds after which the process is killed; 300, or twice as many on GPUs, where kernels are compiled.

    Raises:
        EngineError: the process failed or took too long, or a plugin did not load.
    """
    timeout = timeout or (600 if run.gpus else 300)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer, log = (Path(folder) / name for name in ("run.json", "report.json", "log.txt"))
        asked.write_text(json.dumps(asdict(run)))
        with log.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(asked), str(answer)],
                env=environment(run),
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                code: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = f"none within {timeout} s"
        text = log.read_text()
        if code != 0:
            raise EngineError(f"exit code: {code}", text)
        # vLLM logs this and goes on without the plugin.
        if "Failed to load plugin" in text:
            raise EngineError("a plugin failed to load", text)
        return _report(json.loads(answer.read_text()), text)


def _report(answer: dict[str, Any], log: str) -> Report:
    rounds = [Round(**entry | {"outputs": [_output(x) for x in entry["outputs"]]}) for entry in answer["rounds"]]
    return Report(rounds, answer["runner"], answer["num_blocks"], answer["start_seconds"], log)


def _output(entry: dict[str, Any]) -> Output:
    by_token = {name: _by_token(entry[name]) for name in ("logprobs", "prompt_logprobs")}
    return Output(**entry | by_token)


def _by_token(places: list[dict[str, float]] | None) -> list[dict[int, float]] | None:
    if places is None:
        return None
    return [{int(token): value for token, value in place.items()} for place in places]
