"""Check the training model in fp32 on the CPU: the trunk against transformers, the head against a plain draft loop.

python training/check.py
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from model import Config, Model, rotary, rotate
from torch import Tensor


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def random_model(seed: int = 0) -> Model:
    """A small model whose norms and decays are not at their neutral values."""
    torch.manual_seed(seed)
    model = Model(Config(vocab_size=97, intermediate_size=64, layer_types=["linear_attention", "full_attention"]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@torch.no_grad()
def trunk_error(model: Model) -> float:
    """Logits against transformers' `Qwen3_5ForCausalLM` with the same weights."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**model.c.to_hf())).float().eval()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    missing, unexpected = reference.load_state_dict(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"]}, strict=False
    )
    if missing or unexpected:
        raise SystemExit(f"Tensor names differ: missing {missing}, unexpected {unexpected}.")
    ids = torch.randint(0, 97, (2, 150))
    return error(model.logits(model.model(ids)), reference(ids).logits)


@torch.no_grad()
def head_error(model: Model) -> float:
    """The parallel chains of `MTP.forward` against one chain drafted at a time over a committed prefix."""
    ids = torch.randint(0, 97, (1, 40))
    hidden = model.model(ids)
    embed = model.model.embed_tokens
    parallel = model.mtp(hidden, [embed(F.pad(ids[:, j:], (0, j))) for j in (1, 2, 3)])
    worst = 0.0
    for root in (0, 1, 17, 36):
        # Committed rows: positions 0 .. root, hidden states of the trunk, tokens shifted left by one.
        y, keys, values = _rows(model, hidden[:, : root + 1], ids[:, 1 : root + 2], 0, None, None)
        worst = max(worst, error(y[:, -1], parallel[0][:, root]))
        for step in (1, 2):
            token = ids[:, root + 1 + step : root + 2 + step]
            y, keys, values = _rows(model, y[:, -1:], token, root + step, keys, values)
            worst = max(worst, error(y[:, -1], parallel[step][:, root]))
    return worst


def _rows(model: Model, hidden: Tensor, tokens: Tensor, position: int, keys: Tensor | None, values: Tensor | None):
    """The head over consecutive rows, written out plainly with a key/value cache."""
    mtp, block, c = model.mtp, model.mtp.layers[0], model.c
    attn, n = block.self_attn, tokens.shape[1]
    x = mtp.fc(
        torch.cat([mtp.pre_fc_norm_embedding(model.model.embed_tokens(tokens)), mtp.pre_fc_norm_hidden(hidden)], -1)
    )
    a = block.input_layernorm(x)
    q, gate = attn.q_proj(a).view(1, n, c.num_attention_heads, 2, c.head_dim).unbind(3)
    k = attn.k_norm(attn.k_proj(a).view(1, n, -1, c.head_dim))
    cos, sin = rotary(c, torch.arange(position, position + n))
    q, k = rotate(attn.q_norm(q).transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
    v = attn.v_proj(a).view(1, n, -1, c.head_dim).transpose(1, 2)
    keys, values = (k, v) if keys is None else (torch.cat([keys, k], 2), torch.cat([values, v], 2))
    wide_k, wide_v = (t.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 1) for t in (keys, values))
    scores = q @ wide_k.mT * c.head_dim**-0.5
    allowed = torch.arange(keys.shape[2])[None] <= torch.arange(position, position + n)[:, None]
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ wide_v
    x = x + attn.o_proj((out.transpose(1, 2) * gate.sigmoid()).reshape(1, n, -1))
    return mtp.norm(x + block.mlp(block.post_attention_layernorm(x))), keys, values


def main() -> None:
    model = random_model()
    out = {"trunk": trunk_error(model), "head": head_error(model)}
    print(json.dumps(out))
    if max(out.values()) > 1e-5:
        raise SystemExit("The training model disagrees with its references.")


if __name__ == "__main__":
    main()
