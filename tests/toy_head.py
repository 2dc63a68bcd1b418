"""A tiny float64 multi-token-prediction head, and the same head written plainly in NumPy."""

from collections.abc import Sequence

import numpy as np
import torch

from treewy.cache import AttentionSpec
from treewy.draft.mtp import Attends, MTPHead

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 12, 4, 2, 6, 2


class ToyHead(MTPHead):
    """Attention layers in one residual stream; positions act as in the toy target, so a wrong one shows."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, *, vocab_size: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.embedding = rng.normal(size=(vocab_size, HIDDEN))
        self.mix = rng.normal(size=(HIDDEN, 2 * HIDDEN)) / HIDDEN**0.5
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        self.layers = [
            {name: rng.normal(size=(size, HIDDEN)) / HIDDEN**0.5 for name, size in sizes.items()}
            | {"out": rng.normal(size=(HIDDEN, HEADS * DIM)) / 4}
            for _ in range(LAYERS)
        ]
        self.head = rng.normal(size=(vocab_size, HIDDEN))

    def layer_specs(self) -> Sequence[AttentionSpec]:
        return [AttentionSpec(KV_HEADS, DIM)] * LAYERS

    def forward(self, tokens, hidden, positions, step: Attends) -> torch.Tensor:
        x = torch.cat([torch.from_numpy(self.embedding)[tokens], hidden], dim=-1) @ torch.from_numpy(self.mix).T
        x = torch.tanh(x)
        phase = torch.from_numpy(_phases(positions.numpy()))[:, None]
        for index, layer in enumerate(self.layers):
            w = {name: torch.from_numpy(value) for name, value in layer.items()}
            q, k, v = ((x @ w[name].T).unflatten(-1, (-1, DIM)) for name in ("q", "k", "v"))
            x = x + step.attend(index, q + phase, k + phase, v, scale=DIM**-0.5).flatten(1) @ w["out"].T
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.from_numpy(self.head).T

    def chain(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        """Return the outputs of rows 0..R-1 run as one causal chain, written plainly."""
        positions = np.arange(len(tokens))
        x = np.tanh(np.concatenate([self.embedding[list(tokens)], hidden], axis=1) @ self.mix.T)
        phase = _phases(positions)[:, None]
        for w in self.layers:
            q, k, v = ((x @ w[name].T).reshape(len(tokens), -1, DIM) for name in ("q", "k", "v"))
            q, k = q + phase, k + phase
            rows = []
            for row in positions:
                heads = []
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    scores = k[: row + 1, group] @ q[row, head] / DIM**0.5
                    weights = np.exp(scores - scores.max())
                    heads.append(weights @ v[: row + 1, group] / weights.sum())
                rows.append(np.concatenate(heads))
            x = x + np.stack(rows) @ w["out"].T
        return x / np.sqrt((x * x).mean(-1, keepdims=True))


def _phases(positions: np.ndarray) -> np.ndarray:
    angles = positions[:, None] * 0.37 * np.arange(1, DIM // 2 + 1)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
