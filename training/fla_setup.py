"""Adjustments to fla for one GPU and a short run.

One of its backward kernels gives wrong gradients on Hopper with Triton 3.4 to 3.7.0, so fla refuses to run it there. It
has no sequential part: batched products stand in for it. And its kernels try dozens of launch configurations each, which
takes minutes; here each has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Apply both adjustments. Call it before anything imports fla."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def single(self: Autotuner, fn: Any, arg_names: Any, configs: list, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, [min(configs, key=_preference)] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = single
    from fla.ops.gated_delta_rule import chunk

    Autotuner.__init__ = original
    chunk.chunk_bwd_dqkwg = chunk_bwd_dqkwg


def _preference(config: Any) -> tuple[int, ...]:
    """Smallest for 4 warps, 2 stages and tiles of 64."""
    return (abs(config.num_warps - 4), abs(config.num_stages - 2), *(abs(config.kwargs.get(n, 64) - 64) for n in ("BK", "BV", "BS", "BT")))


def chunk_bwd_dqkwg(q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor, g: Tensor, dv: Tensor,
                    scale: float, chunk_size: int = 64, **_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients within chunks, given the states between them.

    Args:
        q, k, w: [B, T, H, K], T a multiple of the chunk size.
        v, do, dv: New values, gradients of the output and of the new values, [B, T, H, V].
        h, dh: State before each chunk and gradient of the state after it, [B, T / chunk, H, K, V].
        g: Cumulated log2 decay within its chunk, [B, T, H].

    Returns:
        dq, dk, dw [B, T, H, K] and the gradient of the cumulated natural log decay [B, T, H], fp32.
    """
    return _compiled(q, k, v, do, h, dh, g, dv, scale, chunk_size)


def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, g: Tensor, dv: Tensor, scale: float,
              chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The products, in fp32 (TF32 holds bf16 operands exactly)."""
    dtype, (batch, length, heads, _) = q.dtype, q.shape

    def split(x: Tensor) -> Tensor:
        return x.reshape(batch, length // chunk, chunk, heads, -1).transpose(2, 3).float()

    def join(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(batch, length, heads, -1)

    q, k, v, do, dv, g = (split(x) for x in (q, k, v, do, dv, g))
    h, dh = h.float().view(batch, -1, heads, *h.shape[-2:]), dh.float().view(batch, -1, heads, *dh.shape[-2:])
    last = g[..., -1:, :]
    dw = -(dv @ h.mT)
    dq = (do @ h.mT) * torch.exp2(g) * scale
    dk = (v @ dh.mT) * torch.exp2(last - g)
    dlast = (h * dh).sum((-2, -1))[..., None] * torch.exp2(last)[..., 0] + (dk * k).sum((-2, -1))[..., None]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2((g - g.mT).masked_fill(~causal, -torch.inf))
    ds = (do @ v.mT) * decay * scale
    dq = dq + ds @ k
    dk = dk + ds.mT @ q
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + dlast], -1)
    return join(dq).to(dtype), join(dk).to(dtype), join(dw).to(dtype), join(dg[..., None])[..., 0].contiguous()


_compiled = torch.compile(gradients, dynamic=False)
