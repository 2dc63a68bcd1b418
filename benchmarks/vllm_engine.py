"""One vLLM engine with dummy weights, at some numbers of requests: python benchmarks/vllm_engine.py --commit reconstruct.

Needs a GPU and vLLM beside treewy. Acceptance is vLLM's own synthetic one, so that speed means something although the
weights do not. Every engine is a process of its own; alternate the processes to compare. Prints JSON lines: the
environment, then one line per number of requests.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from statistics import median
from typing import Any

from vllm_model import add_options, capacity, counters, header, make_engine, parse, token_ids

# Requests that compile what a run needs, before anything is timed.
WARMS = 32
# Tokens of the runs that are taken away from the whole ones.
SHORT = 8


def options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--requests", type=int, nargs="+", default=[256])
    add("--prompt", type=int, default=1024, help="tokens of each prompt")
    add("--output", type=int, default=168, help=f"tokens that each request generates, more than {SHORT}")
    add("--rounds", type=int, default=1, help="least number of rounds")
    add(
        "--seconds",
        type=float,
        default=0.0,
        help="more rounds until they took so long together: few requests are over soon",
    )
    given = parse(parser)
    if given.output <= SHORT:
        parser.error(f"--output must be above {SHORT}, the tokens of a run that is taken away; got {given.output}")
    return given


def main() -> None:
    """Run one engine."""
    given = options()
    print(json.dumps(header("vllm", given)), flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(given, folder, max(given.requests))
    print(json.dumps({"row": "start", "seconds": time.perf_counter() - start, **capacity(engine)}), flush=True)
    for count in given.requests:
        print(json.dumps(measure(engine, given, count)), flush=True)
    os._exit(0)  # an engine in this process would wait for its own threads


def measure(engine: Any, given: argparse.Namespace, count: int) -> dict[str, Any]:
    """Time whole runs, and runs of a few tokens to take away: what is left is decoding."""
    run(engine, given, min(count, WARMS), SHORT)
    rounds: list[dict[str, Any]] = []
    start = time.perf_counter()
    while len(rounds) < given.rounds or time.perf_counter() - start < given.seconds:
        before = counters(engine)
        few, whole = (run(engine, given, count, tokens) for tokens in (SHORT, given.output))
        after = counters(engine)
        gained = {name: after[name] - before.get(name, 0) for name in after}
        if whole <= few:
            sys.exit(
                f"A run of {given.output} tokens must take longer than one of {SHORT} for decoding to be what is left; {count} "
                f"requests took {whole:.2f} and {few:.2f} s. Generate more tokens: --output."
            )
        rounds.append(
            {
                "decode_tokens_per_s": count * (given.output - SHORT) / (whole - few),
                "tokens_per_s": count * given.output / whole,
                "seconds": whole,
                "counters": gained,
            }
        )
    medians = {name: median(one[name] for one in rounds) for name in ("decode_tokens_per_s", "tokens_per_s")}
    return {"row": "run", "commit": given.commit, "requests": count, **medians, "rounds": rounds}


def run(engine: Any, given: argparse.Namespace, count: int, tokens: int) -> float:
    """Return the seconds that requests of random prompts take together."""
    import torch
    from vllm import SamplingParams

    synchronize = (lambda: None) if given.tiny else torch.cuda.synchronize
    random = torch.Generator().manual_seed(count + tokens)
    shape = (count, given.prompt)
    prompts = [{"prompt_token_ids": ids} for ids in torch.randint(*token_ids(given), shape, generator=random).tolist()]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    synchronize()
    start = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
