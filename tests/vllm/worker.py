"""The process that `engine.execute` starts: builds the engine of a description, serves its rounds, writes a report."""

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = time.monotonic()


def main(asked: Path, answer: Path) -> None:
    """Read a `Run` and write a `Report`, as JSON."""
    run = json.loads(asked.read_text())
    enforce_annotations()
    for name in run["prepare"]:
        named(name)()
    # Not before: vLLM reads its environment and loads plugins when it is imported and configured.
    from vllm import LLM

    from engine import ARGUMENTS

    arguments = ARGUMENTS | {"enable_prefix_caching": False, "disable_log_stats": False} | run["arguments"]
    llm = LLM(model=run["model"], speculative_config=run["speculative"], **arguments)
    report: dict[str, Any] = {"start_seconds": time.monotonic() - START}
    report["runner"] = llm.collective_rpc(lambda worker: type(worker.worker.model_runner).__module__)[0]
    report["num_blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    llm.collective_rpc(lambda worker: install(run["probe"], worker))
    report["rounds"] = []
    for number, requests in enumerate(run["rounds"]):
        if number in run["resets"]:
            assert llm.reset_prefix_cache()
        prompts = [prompt_of(llm, request, run["rounds"], report["rounds"]) for request in requests]
        report["rounds"].append(serve(llm, number, requests, prompts))
    answer.write_text(json.dumps(report))


def enforce_annotations() -> None:
    """Make every annotation of treewy a check and every warning of it an error, as in the other tests."""
    from jaxtyping import install_import_hook

    from ops import typecheck

    install_import_hook("treewy", f"{typecheck.__name__}.checked")
    warnings.filterwarnings("error", module=r"treewy(\.|$)")


def named(name: str) -> Callable[..., Any]:
    """Return the function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def install(probe: str | None, worker: Any) -> None:
    """Set a probe up, in the process of the worker."""
    worker.look = named(probe)(worker.worker) if probe else lambda: None


def prompt_of(llm: Any, request: dict[str, Any], asked: list[Any], served: list[Any]) -> list[int]:
    """Return the token ids of a request's prompt, those of the request that it continues among them."""
    prompt = request["prompt"]
    tokens = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    if request["continues"] is None:
        return tokens
    number, place = request["continues"]
    before = prompt_of(llm, asked[number][place], asked, served)
    return before + served[number]["outputs"][place]["tokens"][: request["keeps"]] + tokens


def serve(llm: Any, number: int, requests: list[dict[str, Any]], prompts: list[list[int]]) -> dict[str, Any]:
    """Serve one round, engine step by engine step, and return it as `engine.Round` has it."""
    before, start = counters(llm), time.monotonic()
    engine, steps = llm.llm_engine, 0
    names = [f"{number}.{place}" for place in range(len(requests))]
    nothing = {"text": "", "reason": None, "logprobs": None, "prompt_logprobs": None, "cached": None}
    last = {name: {"tokens": [], "gains": [], **nothing} for name in names}
    while engine.has_unfinished_requests() or any(request["joins"] >= steps for request in requests):
        for name, request, prompt in zip(names, requests, prompts, strict=True):
            if request["joins"] == steps:
                add(llm, name, prompt, request)
            if request["aborts"] == steps:
                engine.abort_request([name])
                last[name]["reason"] = "abort"
        for output in engine.step():
            note(last[output.request_id], output.outputs[0])
            last[output.request_id]["cached"] = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                last[output.request_id]["prompt_logprobs"] = plain(output.prompt_logprobs[1:])
        steps += 1
    seconds, after = time.monotonic() - start, counters(llm)
    outputs = [last[name] for name in names]
    moved = {key: difference(value, before.get(key)) for key, value in after.items()}
    probed = llm.collective_rpc(lambda worker: worker.look())[0]
    return {"outputs": outputs, "counters": moved, "steps": steps, "seconds": seconds, "probed": probed}


def add(llm: Any, name: str, prompt: list[int], request: dict[str, Any]) -> None:
    """Add one request, under a name."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    detokenize = not llm.llm_engine.vllm_config.model_config.skip_tokenizer_init
    defaults = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": detokenize}
    sampling = defaults | request["sampling"]
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
    priority = request["priority"]
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**sampling), priority=priority)


def note(entry: dict[str, Any], output: Any) -> None:
    """Note what a request has so far."""
    gained = len(output.token_ids) - len(entry["tokens"])
    entry["gains"] += [gained] if gained else []
    entry |= {"tokens": list(output.token_ids), "text": output.text, "reason": output.finish_reason}
    if output.logprobs is not None:
        entry["logprobs"] = plain(output.logprobs)


def plain(places: Any) -> list[dict[int, float]]:
    """Return log-probabilities without what vLLM puts beside them."""
    return [{token: x.logprob for token, x in place.items()} for place in places]


def counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's counters, summed over their labels."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        kind, name = type(metric).__name__, metric.name.removeprefix("vllm:")
        if kind == "Counter":
            found[name] = found.get(name, 0) + metric.value
        if kind == "Vector":
            found[name] = list(metric.values)
        if kind == "Histogram" and name.startswith("treewy_"):
            found[name] = list(metric.buckets.values())
    return found


def difference(after: Any, before: Any) -> Any:
    """Return how far a counter went."""
    if isinstance(after, list):
        return [new - old for new, old in zip(after, before or [0] * len(after), strict=True)]
    return after - (before or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # Taking an engine apart takes seconds, and nobody asks for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
