"""Evaluate a checkpoint: bits per byte with stock transformers, and accept lengths of its MTP head.

    python training/evaluate.py                    # bits per byte of training/heldout
    python training/evaluate.py --accept           # also accept lengths on benchmarks/prompts/heldout.jsonl

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Config, Model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from windows import bits_per_byte, head_agreement

HERE = Path(__file__).parent
WIDTH = 3


def load_head(checkpoint: Path) -> Model:
    """The training model with a checkpoint's weights, fp32, on the CPU."""
    raw = json.loads((checkpoint / "config.json").read_text())
    rope = raw["rope_parameters"]
    known = {k: v for k, v in {**raw, **rope}.items() if k in Config.__dataclass_fields__}
    model = Model(Config(**known))
    model.load_state_dict({k: v.float() for k, v in load_file(checkpoint / "model.safetensors").items()})
    return model.eval()


@torch.no_grad()
def accept_lengths(model: Model, ids: Tensor, prompt: int, temperature: float) -> tuple[float, float, float]:
    """Mean tokens per verify step along a text that the trunk itself generated: chain of 3, tree (3, 3, 3), level 1.

    ids: [1, T], `prompt` tokens of prompt and the generated rest. The drafts of one step depend only on accepted
    tokens, which are the text's, so all of them come from one pass: row t of step j drafts token t + j + 1.
    At temperature 0 a step from root t accepts drafts while they equal the text (the chain's the best, the tree's any
    of the best three). Otherwise the chance of accepting the text's x is min(1, q(x) / p(x)) with sampled drafts,
    which makes the mean exact for each root, every position being one; no tree is computed.
    """
    hidden = model.model(ids)
    target = model.logits(hidden).float()
    outputs = model.mtp(hidden, [model.model.embed_tokens(F.pad(ids[:, j:], (0, j))) for j in (1, 2, 3)])
    drafts = [model.logits(y).float()[0] for y in outputs]
    text, total, first = ids[0], ids.shape[1], prompt - 1
    roots = torch.arange(first, total - 4)
    if temperature > 0:
        alive, mean = torch.ones(len(roots)), torch.ones(len(roots))
        level = 0.0
        for j, logits in enumerate(drafts, 1):
            x = text[roots + j + 1]
            q = (logits[roots] / temperature).softmax(-1).gather(-1, x[:, None])[:, 0]
            p = (target[0, roots + j] / temperature).softmax(-1).gather(-1, x[:, None])[:, 0]
            alive = alive * (q / p).clamp(max=1)
            mean = mean + alive
            level = alive.mean().item() if j == 1 else level
        return mean.mean().item(), float("nan"), level
    results = []
    for width in (1, WIDTH):
        hit = [
            (logits.topk(width, -1).indices[roots] == text[roots + j + 1, None]).any(-1)
            for j, logits in enumerate(drafts, 1)
        ]
        lengths = 1 + torch.stack(hit).int().cumprod(0).sum(0)
        at, steps = 0, 0
        while at < len(roots):
            at += lengths[at].item()
            steps += 1
        results.append(at / steps)
        if width == 1:
            level = hit[0].float().mean().item()
    return results[0], results[1], level


def distinct(ids: list[int], n: int = 4) -> float:
    """Share of distinct n-grams of tokens."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def generate(model, ids: Tensor, length: int, temperature: float) -> Tensor:
    """Continue with stock transformers: greedy at temperature 0, else plain sampling."""
    choice = (
        {"do_sample": False}
        if temperature == 0
        else {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    )
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, **choice
    )


def accept_report(checkpoint: Path, stock, length: int) -> dict:
    """Accept lengths per kind and temperature, averaged over prompts."""
    model, tokenizer = load_head(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    prompts = [json.loads(line) for line in (HERE.parent / "benchmarks/prompts/heldout.jsonl").read_text().splitlines()]
    out: dict = {}
    for temperature in (0.0, 0.8):
        for kind in ("prose", "code"):
            encoded = [tokenizer(prompt["text"]).input_ids for prompt in prompts if prompt["kind"] == kind]
            # Cut from the left to the shortest prompt, so that all generate as one batch without padding.
            start = min(map(len, encoded))
            torch.manual_seed(0)
            texts = generate(stock, torch.tensor([ids[-start:] for ids in encoded]), length, temperature)
            rows = [
                [*accept_lengths(model, text[None], start, temperature), distinct(text[start:].tolist())]
                for text in texts
            ]
            chain, tree, level, ratio = torch.tensor(rows).mean(0).tolist()
            out[f"{kind}, temperature {temperature:g}"] = {
                "chain": round(chain, 3),
                "level_1": round(level, 3),
                "distinct_4grams": round(ratio, 3),
                **({"tree": round(tree, 3)} if temperature == 0 else {}),
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "src/treewy/assets/checkpoint")
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("--accept-only", action="store_true")
    parser.add_argument("--length", type=int, default=192, help="tokens generated per prompt")
    args = parser.parse_args()
    stock, info = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32, output_loading_info=True)
    stock = stock.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    out: dict = {"missing_keys": sorted(info["missing_keys"]), "unexpected_keys": sorted(info["unexpected_keys"])}
    for kind in () if args.accept_only else ("prose", "code"):
        documents = (HERE / "heldout" / f"{kind}.txt").read_text().split("\f")
        out[kind] = {
            "bits_per_byte": bits_per_byte(lambda ids: stock(ids).logits, documents, args.checkpoint / "tokenizer.json")
        }
        if args.accept:
            model = load_head(args.checkpoint)
            out[kind]["agreement"] = head_agreement(model, documents, args.checkpoint / "tokenizer.json")
    if args.accept or args.accept_only:
        out["accept_length"] = accept_report(args.checkpoint, stock.cpu(), args.length)
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
