"""One vLLM engine under many loads: python benchmarks/vllm_sweep.py --commit reconstruct --utilisation 0.6.

Needs a GPU and vLLM beside treewy. An engine starts once and serves every point, each for a ramp and a window of seconds:
with so many requests at any time (`--concurrency`), then with requests that come at random, so many a second (`--rate`). The
model has dummy weights and vLLM's synthetic acceptance, see vllm_model.py. Prints JSON lines: the environment, the start,
and a row per point. Results go to benchmarks/results/sweep-*.jsonl; report.py makes docs/sweep.md of them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from serving import Clock, Engine, Gain, Load, Point, measure
from vllm_model import add_options, capacity, counters, header, make_engine, parse, token_ids
from workload import Lengths, mix


class Served:
    """vLLM's engine as `serving` drives it: in this process, step by step."""

    def __init__(self, llm: Any, ids: tuple[int, int]) -> None:
        self._llm, self._engine, self._ids = llm, llm.llm_engine, ids
        self._scheduler = self._engine.engine_core.engine_core.scheduler

    def add(self, name: str, lengths: Lengths, random: np.random.Generator) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=lengths.output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = random.integers(*self._ids, size=lengths.prompt).tolist()
        self._engine.add_request(name, tokens_input(prompt), sampling)

    def step(self) -> list[Gain]:
        return [Gain(x.request_id, len(x.outputs[0].token_ids), x.finished) for x in self._engine.step()]

    def load(self) -> Load:
        return Load(self._scheduler.kv_cache_manager.usage, *self._scheduler.get_request_counts())

    def counters(self) -> dict[str, float]:
        return counters(self._llm)

    def abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)


def options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add = parser.add_argument
    add(
        "--concurrency", type=int, nargs="+", default=[], help="requests at any time; 1 8 32 128 256 if nothing is said"
    )
    add("--rate", type=float, nargs="+", default=[], help="requests a second, which come at random")
    add("--mix", choices=("sharegpt",), default="sharegpt", help="lengths of prompts and outputs")
    add("--ramp", type=float, default=3.0, help="seconds before each window")
    add("--seconds", type=float, default=9.0, help="of each window")
    add("--warm", type=float, default=2.0, help="seconds of load at the highest level before the first point")
    add("--seed", type=int, default=0)
    add("--max-num-seqs", type=int, default=256)
    add("--json", type=Path, help="append the lines to this file as well")
    given = parse(parser)
    if not given.rate:
        given.concurrency = given.concurrency or [1, 8, 32, 128, 256]
    levels = [*given.concurrency, *given.rate]
    if min(levels) <= 0:
        parser.error(f"--concurrency and --rate must be above 0; got {min(levels):g}")
    if max(given.concurrency, default=1) > given.max_num_seqs:
        parser.error(f"--concurrency goes up to --max-num-seqs {given.max_num_seqs}; got {max(given.concurrency)}")
    return given


def main() -> None:
    """Run the points of one engine."""
    given = options()
    emit(header("vllm sweep", given, given.seed), given.json)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(given, folder, given.max_num_seqs)
    asynchronous = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    started = {"row": "start", "seconds": time.perf_counter() - start, "async_scheduling": asynchronous}
    emit(started | capacity(llm), given.json)
    for row in sweep(Served(llm, token_ids(given)), given):
        emit(row | capacity(llm), given.json)
    os._exit(0)  # an engine in this process would wait for its own threads


def sweep(engine: Engine, given: argparse.Namespace, clock: Clock | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row per point."""
    lengths = mix(given.mix, given.max_model_len)
    points = [("closed", level) for level in given.concurrency] + [("poisson", level) for level in given.rate]
    if given.warm:
        # A seed of its own: the points' requests are those of any engine.
        kind, level = max((point for point in points if point[0] == points[0][0]), key=itemgetter(1))
        measure(engine, Point(kind, level, 0.0, given.warm, given.seed + 1), lengths, given.max_num_seqs, clock)
    asked = ("commit", "widths", "drafts", "acceptance", "utilisation", "mix", "seed", "max_num_seqs", "ramp")
    for arrivals, level in points:
        point = Point(arrivals, level, given.ramp, given.seconds, given.seed)
        row = {"row": "point", **{name: getattr(given, name) for name in asked}, "arrivals": arrivals}
        row["concurrency" if arrivals == "closed" else "rate"] = level
        yield row | measure(engine, point, lengths, given.max_num_seqs, clock)


def emit(row: dict[str, Any], file: Path | None) -> None:
    """Print a line, and append it to a file."""
    line = json.dumps(row, default=str)
    print(line, flush=True)
    if file is not None:
        with file.open("a") as sink:
            sink.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
