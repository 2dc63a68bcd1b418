"""An independent oracle for the toy target: NumPy, one token at a time, whole histories, no cache, no tree.

It shares with the code under test the weights and `reference.walk`, the recurrence as it is defined, and nothing else.
"""

import copy
from collections.abc import Sequence

import numpy as np

from treewy.model import ToyTarget
from treewy.ops.gdn import reference


class Transcript:
    """One sequence: everything its layers have seen so far.

    Attributes:
        tokens: The tokens so far.
        states: Recurrent state [HV, V, K] of each gated-delta layer.
        inputs: Conv inputs of each gated-delta layer, one per token.
        keys, values: Of each attention layer, one [heads, dim] per token.
        hidden: What the head saw after the newest token.
    """

    hidden: np.ndarray

    def __init__(self, target: ToyTarget) -> None:
        self.target, self.config = target, target.config
        self.weights = [{name: w.numpy() for name, w in layer.items()} for layer in target.layers]
        kinds = dict(enumerate(self.config.layers))
        c = self.config
        self.tokens: list[int] = []
        self.states = {i: np.zeros((c.num_value_heads, c.value_dim, c.key_dim)) for i, k in kinds.items() if k == "d"}
        self.inputs: dict[int, list[np.ndarray]] = {i: [] for i, kind in kinds.items() if kind == "d"}
        self.keys: dict[int, list[np.ndarray]] = {i: [] for i, kind in kinds.items() if kind == "a"}
        self.values: dict[int, list[np.ndarray]] = {i: [] for i, kind in kinds.items() if kind == "a"}

    def fork(self) -> "Transcript":
        """Return an independent copy, to try a continuation on."""
        twin = copy.copy(self)
        twin.tokens, twin.states = list(self.tokens), dict(self.states)
        for name in ("inputs", "keys", "values"):
            setattr(twin, name, {i: list(rows) for i, rows in getattr(self, name).items()})
        return twin

    def push(self, token: int) -> np.ndarray:
        """Take one token; return the logits after it."""
        x = self.target.embedding.numpy()[token]
        for index, kind in enumerate(self.config.layers):
            x = x + (self._delta if kind == "d" else self._attention)(index, _norm(x))
        self.tokens.append(token)
        self.hidden = _norm(x)
        return self.target.head.numpy() @ self.hidden

    def run(self, tokens: Sequence[int]) -> np.ndarray:
        """Take several tokens; return the logits after each."""
        return np.stack([self.push(token) for token in tokens])

    def window(self, layer: int) -> np.ndarray:
        """Return the last W - 1 conv inputs [W - 1, C], zeros before the first token."""
        size = self.config.conv_width - 1
        channels = self.weights[layer]["qkv"].shape[0]
        return np.stack(([np.zeros(channels)] * size + self.inputs[layer])[-size:])

    def _delta(self, index: int, x: np.ndarray) -> np.ndarray:
        c, w = self.config, self.weights[index]
        self.inputs[index].append(w["qkv"] @ x)
        convolved = np.zeros(w["qkv"].shape[0])
        for back, row in enumerate(self.inputs[index][: -c.conv_width - 1 : -1]):
            convolved += w["conv"][:, c.conv_width - 1 - back] * row
        mixed = convolved / (1 + np.exp(-convolved))
        num_keys, group = c.num_key_heads * c.key_dim, c.num_value_heads // c.num_key_heads
        q, k = mixed[:num_keys].reshape(-1, c.key_dim), mixed[num_keys : 2 * num_keys].reshape(-1, c.key_dim)
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        row = reference.Rows(
            q=np.repeat(q / np.sqrt(c.key_dim), group, axis=0)[None],
            k=np.repeat(k, group, axis=0)[None],
            v=mixed[2 * num_keys :].reshape(1, c.num_value_heads, c.value_dim),
            g=(-np.exp(w["a_log"]) * np.logaddexp(0, w["a"] @ x + w["dt_bias"]))[None],
            beta=(c.beta_scale / (1 + np.exp(-(w["b"] @ x))))[None],
        )
        o, states = reference.walk(row, self.states[index], (-1,))
        self.states[index] = states[0]
        return w["out"] @ o[0].reshape(-1)

    def _attention(self, index: int, x: np.ndarray) -> np.ndarray:
        c, w = self.config, self.weights[index]
        angles = len(self.tokens) * 0.37 * np.arange(1, c.head_dim // 2 + 1)
        phase = np.concatenate([np.sin(angles), np.cos(angles)])
        self.keys[index].append((w["k"] @ x).reshape(-1, c.head_dim) + phase)
        self.values[index].append((w["v"] @ x).reshape(-1, c.head_dim))
        queries = (w["q"] @ x).reshape(-1, c.head_dim) + phase
        keys, values = np.stack(self.keys[index]), np.stack(self.values[index])
        heads = []
        for head, query in enumerate(queries):
            group = head // (c.num_heads // c.num_kv_heads)
            scores = keys[:, group] @ query / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append(weights @ values[:, group] / weights.sum())
        return w["out"] @ np.concatenate(heads)


def continuation(target: ToyTarget, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the prompt and the `num_tokens` tokens that greedy decoding adds to it."""
    transcript, tokens = Transcript(target), list(prompt)
    logits = transcript.run(prompt)[-1]
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(logits.argmax()))
        logits = transcript.push(tokens[-1])
    return tokens


def _norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + 1e-6)
