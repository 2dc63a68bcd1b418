"""Losslessness and accept lengths on the held-out prompts: python benchmarks/heldout.py.

Every prompt is decoded greedily without drafts, by stock transformers, and with each draft shape under each commit
policy. Differences are judged by the rule of docs/lossless.md; accept lengths stand beside the share of distinct
4-grams, because text that loops is easy to draft.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from rich.progress import track

from treewy.bench.environment import environment
from treewy.cache import POLICIES
from treewy.engine import Engine, Generation, SamplingParams
from treewy.engine.lossless import Reference, Verdict, compare_decoders
from treewy.hf.checkpoint import load_model, load_tokenizer, resolve
from treewy.hf.load import build_engine, resolve_dtype
from treewy.hf.stock import Stock, stock_generate
from treewy.tree import DraftTree

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
SHAPES = {"chain 3": DraftTree.chain(3), "tree 3,3,3": DraftTree.from_widths([3, 3, 3])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; default: the shipped one")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--prompts", type=int, default=None, help="only so many prompts, evenly spaced")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; a model this small gains nothing from more"
    )
    parser.add_argument("--name", default="heldout", help="file under benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    folder = resolve(options.model)
    model = load_model(folder, resolve_dtype(options.dtype, torch.device(options.device)), options.device)
    tokenizer = load_tokenizer(folder)
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen = options.prompts or len(prompts)
    prompts = prompts[:: max(1, len(prompts) // chosen)][:chosen]
    ids = [list(tokenizer.encode(prompt["text"])) for prompt in prompts]

    make = partial(build_engine, model, folder=folder, max_num_seqs=1)
    plain = make(draft="none")
    reference = _cached(lambda prompt, n: _reference(plain, prompt, n))
    rows = [_row("none", "reconstruct", prompts, *_decode(plain, ids, options.tokens, reference))]
    stock = _cached(lambda prompt, n: stock_generate(model, prompt, n))
    rows.append(_stock_row(ids, options.tokens, reference, stock))
    for name, shape in SHAPES.items():
        for policy in POLICIES:
            engine = make(draft="mtp", shape=shape, commit=policy)
            rows.append(_row(name, policy, prompts, *_decode(engine, ids, options.tokens, reference)))
    where = environment(options.device)
    common = {
        "benchmark": "heldout",
        "dtype": options.dtype,
        "num_prompts": len(prompts),
        "tokens_per_prompt": options.tokens,
    }
    path = record.write(options.name, [common | row | {"environment": where} for row in rows])
    _print(rows)
    print(f"written to {path}")


def _decode(
    engine: Engine, prompts: list[list[int]], num_tokens: int, reference: Callable[[list[int], int], Reference]
) -> tuple[list[Generation], Verdict]:
    """Decode every prompt, and hold the tokens against the undrafted ones."""
    engine.generate([prompts[0]], _params(4))
    generations, verdict = [], Verdict([], 0)
    for prompt in track(prompts, description="decoding", transient=True):
        first = engine.generate([prompt], _params(num_tokens))[0]
        known = {tuple(prompt): first.token_ids}

        def drafted(context: list[int], n: int, known: dict = known) -> list[int]:
            return known.get(tuple(context)) or engine.generate([context], _params(n))[0].token_ids

        verdict += compare_decoders(prompt, num_tokens, reference, drafted)
        generations.append(first)
    return generations, verdict


def _reference(engine: Engine, prompt: list[int], num_tokens: int) -> Reference:
    generation = engine.generate([prompt], _params(num_tokens))[0]
    return Reference(generation.token_ids, generation.top2_gaps)


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, record_gaps=True)


def _cached(decode: Callable[[list[int], int], Any]) -> Callable[[list[int], int], Any]:
    known: dict[tuple, Any] = {}

    def decoded(prompt: list[int], num_tokens: int) -> Any:
        key = (tuple(prompt), num_tokens)
        if key not in known:
            known[key] = decode(prompt, num_tokens)
        return known[key]

    return decoded


def _row(
    shape: str, policy: str, prompts: list[dict[str, str]], generations: list[Generation], verdict: Verdict
) -> dict[str, Any]:
    kinds = sorted({prompt["kind"] for prompt in prompts})
    of_kind = {kind: [g for g, p in zip(generations, prompts, strict=True) if p["kind"] == kind] for kind in kinds} | {
        "all": generations
    }
    return {
        "shape": shape,
        "policy": policy,
        "mean_accept_len": {kind: _accept_len(chosen) for kind, chosen in of_kind.items()},
        "distinct_4grams": {
            kind: statistics.mean(distinct_ngrams(g.token_ids, 4) for g in chosen) for kind, chosen in of_kind.items()
        },
        "accept_rate_by_depth": _mean_by_depth(generations),
        "not_first_sibling_share": _sibling_share(generations),
        "tokens_per_s": statistics.median(g.tokens_per_s for g in generations),
        "state_bytes": max(g.state_bytes for g in generations),
        **_judged(verdict),
    }


def _stock_row(
    prompts: list[list[int]],
    num_tokens: int,
    reference: Callable[[list[int], int], Reference],
    stock: Callable[[list[int], int], Stock],
) -> dict[str, Any]:
    verdict = Verdict([], 0)
    stock(prompts[0], 4)
    for prompt in track(prompts, description="stock transformers", transient=True):
        verdict += compare_decoders(prompt, num_tokens, reference, lambda *asked: stock(*asked).token_ids)
    speed = statistics.median(stock(prompt, num_tokens).tokens_per_s for prompt in prompts)
    return {"shape": "stock transformers", "policy": "", "tokens_per_s": speed, **_judged(verdict)}


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "compared_tokens": verdict.num_tokens,
        "differences": [difference._asdict() for difference in verdict.differences],
        "lossless": verdict.is_lossless,  # by the float32 rule, whatever the dtype
    }


def _accept_len(generations: list[Generation]) -> float:
    return sum(len(g.token_ids) - 1 for g in generations) / sum(g.num_verify_steps for g in generations)


def _mean_by_depth(generations: list[Generation]) -> dict[str, float]:
    depths = sorted({depth for g in generations for depth in g.accept_rate_by_depth})
    return {str(d): statistics.mean(g.accept_rate_by_depth.get(d, 0.0) for g in generations) for d in depths}


def _sibling_share(generations: list[Generation]) -> float:
    return statistics.mean(g.not_first_sibling_share for g in generations)


def distinct_ngrams(tokens: list[int], n: int) -> float:
    """Return the share of n-grams that are distinct; 1 for text that never repeats n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figures = (
            f"{len(row['differences'])} differences in {row['compared_tokens']} tokens, lossless {row['lossless']}"
        )
        if "mean_accept_len" in row:
            figures = (
                f"accept {row['mean_accept_len']['all']:.2f}, distinct 4-grams {row['distinct_4grams']['all']:.2f}, "
                f"not first siblings {row['not_first_sibling_share']:.3f}, {row['tokens_per_s']:.0f} tokens/s, "
                + figures
            )
        print(f"{row['shape']:<20}{row['policy']:<13}{figures}")


if __name__ == "__main__":
    main()
