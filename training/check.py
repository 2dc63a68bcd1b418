"""Check the training model: against transformers and the head against a draft loop on a CPU; on CUDA fla against torch.

    python training/check.py
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from fla_setup import gradients, install
from model import Config, Model, delta_rule, rotary, rotate
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
    missing, unexpected = reference.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, strict=False)
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
        y, keys, values = _rows(model, hidden[:, :root + 1], ids[:, 1:root + 2], 0, None, None)
        worst = max(worst, error(y[:, -1], parallel[0][:, root]))
        for step in (1, 2):
            token = ids[:, root + 1 + step:root + 2 + step]
            y, keys, values = _rows(model, y[:, -1:], token, root + step, keys, values)
            worst = max(worst, error(y[:, -1], parallel[step][:, root]))
    return worst


def _rows(model: Model, hidden: Tensor, tokens: Tensor, position: int, keys: Tensor | None, values: Tensor | None):
    """The head over consecutive rows, written out plainly with a key/value cache."""
    mtp, block, c = model.mtp, model.mtp.layers[0], model.c
    attn, n = block.self_attn, tokens.shape[1]
    x = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(model.model.embed_tokens(tokens)), mtp.pre_fc_norm_hidden(hidden)], -1))
    a = block.input_layernorm(x)
    q, gate = attn.q_proj(a).view(1, n, c.num_attention_heads, 2, c.head_dim).unbind(3)
    k = attn.k_norm(attn.k_proj(a).view(1, n, -1, c.head_dim))
    cos, sin = rotary(c, torch.arange(position, position + n))
    q, k = rotate(attn.q_norm(q).transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
    v = attn.v_proj(a).view(1, n, -1, c.head_dim).transpose(1, 2)
    keys, values = (k, v) if keys is None else (torch.cat([keys, k], 2), torch.cat([values, v], 2))
    wide_k, wide_v = (t.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 1) for t in (keys, values))
    scores = q @ wide_k.mT * c.head_dim ** -0.5
    allowed = torch.arange(keys.shape[2])[None] <= torch.arange(position, position + n)[:, None]
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ wide_v
    x = x + attn.o_proj((out.transpose(1, 2) * gate.sigmoid()).reshape(1, n, -1))
    return mtp.norm(x + block.mlp(block.post_attention_layernorm(x))), keys, values


def backward_error() -> float:
    """`fla_setup.gradients` against autograd through one chunk, fp64 inputs, fp32 inside."""
    torch.manual_seed(2)
    q, k, v, w = (torch.randn(1, 64, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(4))
    h = torch.randn(1, 1, 2, 16, 16, dtype=torch.float64)
    g = (-torch.rand(1, 64, 2, dtype=torch.float64)).cumsum(1).requires_grad_()
    do, dv = torch.randn(1, 64, 2, 16).double(), torch.randn(1, 64, 2, 16).double()
    dh = torch.randn_like(h)
    gh = g.transpose(1, 2)
    decay = (gh[..., :, None] - gh[..., None, :]).masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf).exp()
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * decay
    out = 0.25 * (torch.einsum("bhij,bjhv->bihv", scores, v) + torch.einsum("bihk,bhkv,bih->bihv", q, h[:, 0], g.exp()))
    state = g[:, -1].exp()[..., None, None] * h[:, 0] + torch.einsum("bjhk,bjh,bjhv->bhkv", k, (g[:, -1:] - g).exp(), v)
    read = -torch.einsum("bihk,bhkv->bihv", w, h[:, 0])
    ((do * out).sum() + (dh[:, 0] * state).sum() + (dv * read).sum()).backward()
    got = gradients(q, k, v, do, h, dh, g / torch.log(torch.tensor(2.0)).double(), dv, 0.25, 64)
    return max(error(a.detach(), b.grad) for a, b in zip(got, (q, k, w, g), strict=True))


def kernel_errors() -> dict[str, float]:
    """fla's chunked kernel in bf16 against the torch rule in fp32, forward and gradients."""
    install()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 512, 4, 64) for _ in range(3))
    g, beta = -F.softplus(torch.randn(2, 512, 4) - 2), torch.rand(2, 512, 4)
    grad = torch.randn(2, 512, 4, 64)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (q, k, v)] + [t.to(device).requires_grad_() for t in (g, beta)]
        out = delta_rule(*leaves)
        out.backward(grad.to(out))
        results.append([out.detach().cpu(), *(t.grad.cpu() for t in leaves)])
    return {n: error(b, a) for n, a, b in zip(("out", "dq", "dk", "dv", "dg", "dbeta"), *results, strict=True)}


def main() -> None:
    if torch.cuda.is_available():
        out: dict = {"kernel": kernel_errors()}
    else:
        model = random_model()
        out = {"trunk": trunk_error(model), "head": head_error(model), "backward": backward_error()}
    print(json.dumps(out))
    if max(out.get(n, 0) for n in ("trunk", "head", "backward")) > 1e-5 or any(e > 0.03 for e in out.get("kernel", {}).values()):
        raise SystemExit("The training model disagrees with its references.")


if __name__ == "__main__":
    main()
