"""Muon for the matrices of the layers, AdamW for the rest, each over stacks of equal shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest semi-orthogonal matrix, for a stack [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


_compiled = torch.compile(orthogonalise, dynamic=False)


class Muon:
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024), with decoupled weight decay."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.momentum, self.decay = momentum, decay
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; each matrix moves by lr * sqrt(max(1, rows / cols)) in spectral norm."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group])
            buffer.lerp_(grad, 1 - self.momentum)
            average = grad.lerp(buffer, self.momentum)
            update = _compiled(average) if average.is_cuda else orthogonalise(average)
            rows, cols = group[0].shape
            scale = -lr * max(1.0, rows / cols) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=scale)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices (Muon), the embedding, and vectors with small projections and convolutions."""
    matrices, tables, others = [], [], []
    for name, p in model.named_parameters():
        if "embed_tokens" in name:
            tables.append(p)
        elif p.dim() == 2 and min(p.shape) >= 16:
            matrices.append(p)
        else:
            others.append(p)
    return matrices, tables, others
