"""Train the checkpoint on one GPU within a wall-clock budget.

    python training/train.py --tokens .carry --out OUT --max-seconds 450 --decay-share 0.2 --state STATE
    python training/train.py --tokens .carry --out OUT --max-seconds 205 --decay-share 0.85 --resume STATE

The learning rate warms up, stays, and falls linearly to zero over the last `--decay-share` of the budget; the state at
the start of the fall is kept, so that a later run can go on from there.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import time
from pathlib import Path

import losses
import numpy as np
import torch
from losses import STEPS, Losses
from model import Block, Config, Model
from optim import Muon, split
from safetensors.torch import save_file
from torch import Tensor
from windows import bits_per_byte, head_agreement

WARMUP = 300


class Stream:
    """Random windows of the token streams, drawn in proportion to weight times length."""

    def __init__(self, folder: Path, device: str, seed: int) -> None:
        parts, starts, weights, at = [], [], [], 0
        for path in sorted(folder.glob("weight*.u16.xz")):
            ids = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)
            parts.append(ids)
            starts.append((at, len(ids)))
            weights.append(int(path.name[6:].split(".")[0]) * len(ids))
            at += len(ids)
        self.ids = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
        self.ranges = starts
        self.share = torch.tensor(weights, dtype=torch.float32, device=device) / sum(weights)
        self.rng = torch.Generator(device).manual_seed(seed)
        self.epoch_tokens = sum(weights)

    def batch(self, size: int, length: int) -> Tensor:
        """[size, length] token ids."""
        device = self.ids.device
        which = torch.multinomial(self.share, size, replacement=True, generator=self.rng)
        first = torch.tensor([a for a, _ in self.ranges], device=device)[which]
        count = torch.tensor([n for _, n in self.ranges], device=device)[which]
        start = first + (torch.rand(size, device=device, generator=self.rng) * (count - length)).long()
        return self.ids[start[:, None] + torch.arange(length, device=device)].long()


def rate(step: int, elapsed: float, budget: float, decay_share: float, resumed: bool) -> float:
    """Learning-rate factor: warm-up in steps, the fall in wall-clock time."""
    warm = 1.0 if resumed else min(1.0, (step + 1) / WARMUP)
    left = (budget - elapsed) / (decay_share * budget)
    return warm * max(0.0, min(1.0, left))


class Trainer:
    """Model, optimisers and the compiled step."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args, self.device = args, "cuda" if torch.cuda.is_available() else "cpu"
        self.model = Model(Config(**json.loads(args.config)) if args.config else Config()).to(self.device)
        matrices, tables, others = split(self.model)
        self.muon = Muon(matrices)
        groups = [{"params": tables, "base": args.lr_embed}, {"params": others, "base": args.lr_other}]
        self.adam = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=self.device == "cuda"
        )
        self.step = 0
        self.tokens = 0
        if self.device == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Compile everything but the delta rule, region by region; training only ever has one shape."""
        self.model.mtp.prepare(self.args.length, STEPS)
        losses.tail = torch.compile(losses.tail, dynamic=False)
        for name in ("before", "after", "attention"):
            setattr(Block, name, torch.compile(getattr(Block, name), dynamic=False))

    def loss(self, window: Tensor) -> Losses:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return losses.objective(self.model, window, self.args.soft, self.args.trunk_scale)

    def update(self, window: Tensor, factor: float) -> Losses:
        """One optimiser step."""
        result = self.loss(window)
        (result.trunk + result.head).backward()
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"] + self.adam.param_groups[1]["params"], 1.0)
        # Momentum warms up with the rate: early gradients are of little worth later.
        self.muon.momentum = 0.85 + 0.1 * min(1.0, self.step / WARMUP)
        self.muon.step(self.args.lr_matrix * factor)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += window.shape[0] * (window.shape[1] - 1)
        return result

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
        }

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        if "muon" in state:
            self.muon.buffers = state["muon"]
            self.adam.load_state_dict(state["adam"])
        self.step, self.tokens = state.get("step", WARMUP), state.get("tokens", 0)


def export(model: Model, path: Path) -> None:
    """Write bf16 weights under a checkpoint's names; the decay parameters stay fp32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, p in model.state_dict().items():
        keep = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        tensors[name] = p.detach().to(torch.float32 if keep else torch.bfloat16).contiguous().cpu()
    save_file(tensors, str(path), metadata={"format": "pt"})


def evaluate(trainer: Trainer, heldout: Path, tokenizer: Path) -> dict:
    """Held-out figures with the weights rounded to bf16; on CUDA activations are bf16 too."""
    model = Model(trainer.model.c).to(trainer.device)
    rounded = {k: v.bfloat16().float() if v.numel() > 1000 else v for k, v in trainer.model.state_dict().items()}
    model.load_state_dict(rounded)
    model.eval()
    out = {}
    torch.compiler.set_stance("force_eager")
    for kind in ("prose", "code"):
        documents = (heldout / f"{kind}.txt").read_text().split("\f")
        with torch.autocast(trainer.device, torch.bfloat16, enabled=trainer.device == "cuda"):
            out[kind] = {
                "bits_per_byte": bits_per_byte(lambda ids: model.logits(model.model(ids)), documents, tokenizer),
                "agreement": head_agreement(model, documents, tokenizer),
            }
    return out


def run(args: argparse.Namespace) -> None:
    """Train until the budget ends, log, export, evaluate."""
    begun = time.monotonic()
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    stream = Stream(args.tokens, trainer.device, args.seed + 1000 * trainer.step)
    args.out.mkdir(parents=True, exist_ok=True)
    curves = args.out / "curves.jsonl"
    curves.unlink(missing_ok=True)
    kept, lapse, lapse_tokens = False, time.monotonic(), trainer.tokens
    print(
        json.dumps(
            {
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "setup_s": lapse - begun,
                "epoch_tokens": stream.epoch_tokens,
            }
        ),
        flush=True,
    )
    first = trainer.step
    while True:
        elapsed = time.monotonic() - begun
        if elapsed >= args.max_seconds or (args.max_steps and trainer.step - first >= args.max_steps):
            break
        factor = rate(trainer.step, elapsed, args.max_seconds, args.decay_share, bool(args.resume))
        if factor < 1.0 and trainer.step > WARMUP and not kept:
            kept = True
            if args.state:
                torch.save(trainer.state(), args.state)
            export(trainer.model, args.out / "stable.safetensors")
        result = trainer.update(stream.batch(args.batch, args.length + 1), factor)
        if trainer.step % args.log_every == 0:
            row = {
                "step": trainer.step,
                "tokens": trainer.tokens,
                "seconds": round(time.monotonic() - begun, 1),
                "lr": round(factor, 4),
                "trunk": result.trunk.item(),
                "head": result.head.item(),
                "hard": result.hard.tolist(),
                "agree": result.agree.tolist(),
            }
            row["tokens_per_s"] = round((trainer.tokens - lapse_tokens) / (time.monotonic() - lapse))
            lapse, lapse_tokens = time.monotonic(), trainer.tokens
            with curves.open("a") as log:
                log.write(json.dumps(row) + "\n")
            if trainer.step % (10 * args.log_every) == 0 or trainer.step < 200:
                print(json.dumps(row), flush=True)
            if not math.isfinite(row["trunk"]):
                raise SystemExit("The loss is not finite; lower the learning rates.")
    export(trainer.model, args.out / "model.safetensors")
    result = {
        "step": trainer.step,
        "tokens": trainer.tokens,
        "train_s": time.monotonic() - begun,
        "argv": {k: str(v) for k, v in vars(args).items()},
        "torch": torch.__version__,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if trainer.device == "cuda" else None,
    }
    print(json.dumps(result), flush=True)
    result["heldout"] = evaluate(trainer, args.heldout, args.tokenizer)
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["heldout"]), flush=True)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder of weight*.u16.xz")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--tokenizer", type=Path, default=here.parent / "src/treewy/assets/checkpoint/tokenizer.json")
    parser.add_argument("--heldout", type=Path, default=here / "heldout")
    parser.add_argument("--max-seconds", type=float, default=540)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--decay-share", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr-matrix", type=float, default=0.02)
    parser.add_argument("--lr-embed", type=float, default=0.003)
    parser.add_argument("--lr-other", type=float, default=0.004)
    parser.add_argument("--soft", type=float, default=0.8)
    parser.add_argument("--trunk-scale", type=float, default=0.2)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--state", type=Path, help="where to keep the state at the start of the fall")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--config", help="JSON overrides of the model's shape")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
