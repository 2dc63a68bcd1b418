"""The training objective: next-token loss of the trunk and the joint multi-step loss of the MTP head."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from model import Model
from torch import Tensor

STEPS = 3


class Losses(NamedTuple):
    """Trunk loss, mean head loss (both nats per token) and per-step figures for the log."""

    trunk: Tensor
    head: Tensor
    hard: Tensor
    agree: Tensor


def scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """x in the forward pass; gradients times `scale` in the backward pass."""
    return x.detach() + scale * (x - x.detach())


def objective(model: Model, window: Tensor, soft: float, trunk_scale: float) -> Losses:
    """Losses on a window of tokens [B, T + 1].

    Step j of the head, at row t, predicts token t + j + 1, as the trunk's row t + j does: the trunk's distribution
    there (detached) is its soft target, with weight `soft`; the token itself has the rest. `trunk_scale` scales the
    gradients that the head's loss sends into the trunk and the shared embedding.
    """
    return tail(model, model.model(window[:, :-1].contiguous()), window, soft, trunk_scale)


def tail(model: Model, hidden: Tensor, window: Tensor, soft: float, trunk_scale: float) -> Losses:
    """`objective` from the trunk's hidden states [B, T, D] on."""
    targets = window[:, 1:]
    length = hidden.shape[1]
    logits = model.logits(hidden)
    trunk = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    table = scaled_gradient(model.model.embed_tokens.weight, trunk_scale)
    shifted = [F.pad(window[:, j:], (0, max(0, length + j - window.shape[1])))[:, :length] for j in range(1, STEPS + 1)]
    outputs = model.mtp(scaled_gradient(hidden, trunk_scale), [F.embedding(s, table) for s in shifted])
    total, hard_list, agree_list = hidden.new_zeros((), dtype=torch.float32), [], []
    for j, y in enumerate(outputs, 1):
        rows = length - j
        draft = F.linear(y[:, :rows], table.to(y.dtype)).float()
        teacher = logits[:, j:].detach().float()
        logp = draft.log_softmax(-1)
        hard = -logp.gather(-1, targets[:, j:, None]).mean()
        distil = -(teacher.softmax(-1) * logp).sum(-1).mean()
        total = total + (soft * distil + (1 - soft) * hard) / STEPS
        hard_list.append(hard.detach())
        agree_list.append((draft.argmax(-1) == teacher.argmax(-1)).float().mean())
    return Losses(trunk, total, torch.stack(hard_list), torch.stack(agree_list))
