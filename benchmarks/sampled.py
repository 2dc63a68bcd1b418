"""Accept lengths of sampled decoding on the held-out prompts: python benchmarks/sampled.py.

Every prompt is decoded at each temperature with each draft shape, with drawn drafts and with the head's most likely ones, all
prompts as one batch. Accept lengths stand beside the share of distinct 4-grams of the text. The law of the text is the same
in every row of one temperature; tests prove that, not this.
"""

import argparse
import json
from typing import Any

import record
import torch
from heldout import PROMPTS, SHAPES, distinct_ngrams
from rich.progress import track

from treewy.bench.environment import environment
from treewy.engine import Generation, SamplingParams
from treewy.hf.checkpoint import load_model, load_tokenizer, resolve
from treewy.hf.load import build_engine

TEMPERATURES = (0.4, 0.6, 0.8, 1.0, 1.2)
DRAFTS = ("sampled", "argmax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; default: the shipped one")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--seed", type=int, default=0, help="prompt i uses seed + i")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="sampled", help="file under benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    folder = resolve(options.model)
    model, tokenizer = load_model(folder, torch.float32, "cpu"), load_tokenizer(folder)
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    ids = [list(tokenizer.encode(prompt["text"])) for prompt in prompts]
    rows = []
    cells = [(t, shape, drafts) for t in options.temperatures for shape in SHAPES for drafts in DRAFTS]
    for temperature, shape, drafts in track(cells, description="sampling", transient=True):
        engine = build_engine(model, draft="mtp", folder=folder, shape=SHAPES[shape], max_num_seqs=len(ids))
        params = [
            SamplingParams(
                temperature=temperature,
                seed=options.seed + place,
                drafts=drafts,
                max_new_tokens=options.tokens,
                ignore_eos=True,
            )
            for place in range(len(ids))
        ]
        generations = engine.generate(ids, params)
        rows.append({"temperature": temperature, "shape": shape, "drafts": drafts} | _figures(prompts, generations))
    common = {"benchmark": "sampled", "dtype": "float32", "num_prompts": len(ids), "tokens_per_prompt": options.tokens}
    where = environment("cpu", options.seed)
    path = record.write(options.name, [common | row | {"environment": where} for row in rows])
    for row in rows:
        print(
            f"{row['temperature']:<5}{row['shape']:<13}{row['drafts']:<9}accept {row['mean_accept_len']['all']:.2f}, "
            f"distinct 4-grams {row['distinct_4grams']:.2f}, not first siblings {row['not_first_sibling_share']:.3f}"
        )
    print(f"written to {path}")


def _figures(prompts: list[dict[str, str]], generations: list[Generation]) -> dict[str, Any]:
    def accept_len(kind: str | None) -> float:
        chosen = [g for g, p in zip(generations, prompts, strict=True) if kind in (None, p["kind"])]
        return sum(len(g.token_ids) - 1 for g in chosen) / sum(g.num_verify_steps for g in chosen)

    kinds = sorted({prompt["kind"] for prompt in prompts})
    num = len(generations)
    return {
        "mean_accept_len": {kind: accept_len(kind) for kind in kinds} | {"all": accept_len(None)},
        "distinct_4grams": sum(distinct_ngrams(g.token_ids, 4) for g in generations) / num,
        "not_first_sibling_share": sum(g.not_first_sibling_share for g in generations) / num,
    }


if __name__ == "__main__":
    main()
