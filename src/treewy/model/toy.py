"""A tiny float64 hybrid with random weights: small enough to prove things on, real enough to break them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from treewy.cache import AttentionSpec, Batch, CachePool, LayerSpec, LinearSpec, Step
from treewy.model.base import Target, Verified
from treewy.ops import gdn
from treewy.shapes import Float, Tensor


class ToyConfig(NamedTuple):
    """Sizes of the toy. `layers`: "d" gated delta, "a" attention."""

    layers: str = "dada"
    vocab_size: int = 64
    hidden: int = 32
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 6
    conv_width: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    beta_scale: float = 1.0
    max_len: int = 4096


class ToyTarget(Target):
    """Gated-delta and attention layers in one residual stream, weights from a seed.

    Positions enter through learned-like sinusoids added to the queries and keys, so that a wrong position shows.
    """

    def __init__(self, config: ToyConfig = ToyConfig(), *, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.config, self.dtype, self.state_dtype = config, dtype, dtype
        self.vocab_size, self.max_len, self.device = config.vocab_size, config.max_len, torch.device("cpu")
        self._generator = torch.Generator().manual_seed(seed)
        self.embedding = self._random(config.vocab_size, config.hidden, scale=1.0)
        self.layers = [self._delta_weights() if kind == "d" else self._attention_weights() for kind in config.layers]
        self.head = self._random(config.vocab_size, config.hidden)

    def layer_specs(self) -> Sequence[LayerSpec]:
        """See `Target.layer_specs`."""
        c = self.config
        delta = LinearSpec(c.num_key_heads, c.num_value_heads, c.value_dim, c.key_dim, self._channels, c.conv_width)
        return [delta if kind == "d" else AttentionSpec(c.num_kv_heads, c.head_dim) for kind in c.layers]

    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        """See `Target.verify`."""
        step = cache.begin(batch.tree, batch.slots, batch.policy)
        x = self.embedding[batch.tokens]
        for index, kind in enumerate(self.config.layers):
            mix = self._delta if kind == "d" else self._attention
            x = x + mix(index, _norm(x), step)
        hidden = _norm(x)
        asked = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        return Verified(asked @ self.head.T, hidden, step.pending())

    @property
    def _channels(self) -> int:
        c = self.config
        return 2 * c.num_key_heads * c.key_dim + c.num_value_heads * c.value_dim

    def _random(self, *shape: int, scale: float | None = None) -> Tensor:
        factor = float(shape[-1]) ** -0.5 if scale is None else scale
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self.dtype) * factor

    def _delta_weights(self) -> dict[str, Tensor]:
        c = self.config
        return {
            "qkv": self._random(self._channels, c.hidden, scale=0.5),
            "conv": self._random(self._channels, c.conv_width, scale=0.5),
            "a": self._random(c.num_value_heads, c.hidden),
            "b": self._random(c.num_value_heads, c.hidden),
            "a_log": self._random(c.num_value_heads, scale=0.5) - 1.0,
            "dt_bias": self._random(c.num_value_heads, scale=0.5),
            "out": self._random(c.hidden, c.num_value_heads * c.value_dim),
        }

    def _attention_weights(self) -> dict[str, Tensor]:
        c = self.config
        return {
            "q": self._random(c.num_heads * c.head_dim, c.hidden, scale=0.5),
            "k": self._random(c.num_kv_heads * c.head_dim, c.hidden, scale=0.5),
            "v": self._random(c.num_kv_heads * c.head_dim, c.hidden),
            "out": self._random(c.hidden, c.num_heads * c.head_dim),
        }

    def _delta(self, index: int, x: Float[Tensor, "N hidden"], step: Step) -> Float[Tensor, "N hidden"]:
        c, w = self.config, self.layers[index]
        mixed = step.conv(index, x @ w["qkv"].T, w["conv"], None, "silu")
        keys = c.num_key_heads * c.key_dim
        q, k, v = mixed.split([keys, keys, c.num_value_heads * c.value_dim], dim=-1)
        q, k = (y.unflatten(-1, (c.num_key_heads, c.key_dim)) for y in (q, k))
        v = v.unflatten(-1, (c.num_value_heads, c.value_dim))
        g, beta = gdn.finish_gates(x @ w["a"].T, x @ w["b"].T, w["a_log"], w["dt_bias"], beta_scale=c.beta_scale)
        o = step.delta(index, gdn.scale_queries(q), gdn.l2_normalise(k), v, g, beta)
        return o.flatten(1).to(x.dtype) @ w["out"].T

    def _attention(self, index: int, x: Float[Tensor, "N hidden"], step: Step) -> Float[Tensor, "N hidden"]:
        c, w = self.config, self.layers[index]
        q, k, v = (
            (x @ w[name].T).unflatten(-1, (heads, c.head_dim))
            for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
        )
        phase = _phases(step.positions, c.head_dim, x.dtype)[:, None]
        o = step.attend(index, q + phase, k + phase, v, scale=c.head_dim**-0.5)
        return o.flatten(1) @ w["out"].T


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


def _phases(positions: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    rates = torch.arange(1, dim // 2 + 1, dtype=dtype, device=positions.device) * 0.37
    angles = positions[:, None].to(dtype) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
