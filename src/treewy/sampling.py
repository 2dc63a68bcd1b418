"""From logits to probabilities: the only softmax over the vocabulary; and the streams of random numbers."""

import secrets
from dataclasses import dataclass

import numpy as np
import torch

from treewy.errors import RequestError
from treewy.shapes import Array, Float, Int, Tensor

# Streams of one request: what a draft was drawn with must not decide whether it stands.
DRAFT, ACCEPT = 0, 1


@dataclass(frozen=True, kw_only=True)
class Law:
    """How logits become a law over tokens: temperature, then top-k, top-p and min-p, each on what is left.

    Attributes:
        temperature: Divides the logits; above 0. (Temperature 0 is greedy decoding and needs no law.)
        top_k: Keep the k most likely tokens; 0 keeps all. Tokens as likely as the k-th stay.
        top_p: Keep the most likely tokens until their probability reaches this; the one that reaches it stays, and so do
            tokens as likely as that one.
        min_p: Keep tokens at least this times as likely as the most likely one.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise RequestError(
                f"A law needs a finite temperature above 0; got {self.temperature}. Use 1 for the model's own law."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(
                f"top_k must be an integer of at least 0; got {self.top_k!r}. Use 0 to keep every token."
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must lie in (0, 1]; got {self.top_p}. Use 1 to keep every token.")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must lie in [0, 1]; got {self.min_p}. Use 0 to keep every token.")

    def probabilities(self, logits: Float[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
        """Return each row's law, in float64; rows sum to 1 up to rounding.

        A row's law depends on that row alone. Rows with a NaN or without a finite logit come out as NaN.
        """
        # The most likely logit becomes 0 first: a small temperature must not overflow.
        wide = logits.double()
        p = torch.softmax((wide - wide.amax(-1, keepdim=True)) / self.temperature, dim=-1)
        if 0 < self.top_k < p.shape[-1]:
            p = _kept(p, p >= p.topk(self.top_k, dim=-1).values[..., -1:])
        if self.top_p < 1:
            p = _kept(p, p >= _nucleus_floor(p, self.top_p))
        if self.min_p > 0:
            p = _kept(p, p >= self.min_p * p.amax(-1, keepdim=True))
        return p


def _kept(p: Tensor, keep: Tensor) -> Tensor:
    # NaN rows keep nothing and would come out as 0 / 0 all the same.
    p = torch.where(keep, p, 0.0)
    return p / p.sum(-1, keepdim=True)


def _nucleus_floor(p: Tensor, top_p: float) -> Tensor:
    """Return the probability of the last token that top-p keeps."""
    ordered = p.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    last = (before < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(-1, last)


def log_probabilities(logits: Float[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    """Return the target's own log-probabilities, before any temperature or truncation, in at least float32."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


class Stream:
    """One request's random numbers for one purpose; the same seed gives the same numbers wherever the request runs.

    Args:
        seed: The request's seed; None takes a fresh one from the system.
        purpose: `DRAFT` or `ACCEPT`: streams of one seed that share no number.
    """

    def __init__(self, seed: int | None, purpose: int) -> None:
        entropy = secrets.randbits(128) if seed is None else seed
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy, spawn_key=(purpose,))))

    @property
    def key(self) -> tuple[int, int]:
        """Two words, as int64, from which `ops.accept.uniforms` makes the same numbers on a device."""
        one, two = self._generator.bit_generator.state["state"]["key"].view(np.int64).tolist()
        return one, two

    def uniform(self, *shape: int) -> Array:
        """Return numbers in [0, 1)."""
        return self._generator.random(shape)

    def flip(self, probability: float) -> bool:
        """See `accept.Coin.flip`."""
        return bool(self._generator.random() < probability)

    def draw(self, weights: Array) -> int:
        """See `accept.Coin.draw`."""
        return draw(weights, self._generator.random())


def draw(weights: Array, uniform: float) -> int:
    """Return the index at which the running sum of `weights` passes `uniform` times their total; never one of weight 0."""
    passed = np.cumsum(weights)
    index = int(np.searchsorted(passed, uniform * passed[-1], side="right"))
    # Rounding may carry the last number past every sum.
    return min(index, int(np.flatnonzero(weights)[-1]))


def draw_without_replacement(
    probabilities: Float[Tensor, "R vocab"], uniforms: Float[Tensor, "R X"]
) -> Int[Tensor, "R X"]:
    """Draw X different tokens per row, one after the other, each from what the ones before it left.

    Where a row's support is used up, the lowest ids not taken stand in: chosen, not drawn (see `accept.choose_sampled`).

    Args:
        probabilities: One law per row; a row of zeros draws nothing.
        uniforms: Numbers in [0, 1), one per row and draw.
    """
    left = probabilities.clone()
    taken = torch.zeros_like(left, dtype=torch.bool)
    drawn = []
    for uniform in uniforms.unbind(-1):
        sums = left.cumsum(-1)
        token = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).clamp(max=left.shape[-1] - 1)
        # Rounding may carry the last number past every sum; and sums taken in parallel can grow where nothing is added.
        token = torch.where(left.gather(-1, token) > 0, token, _last_positive(left)[:, None])
        spent = sums[:, -1:] <= 0
        token = torch.where(spent, (~taken).int().argmax(-1, keepdim=True), token)
        left.scatter_(-1, token, 0.0)
        taken.scatter_(-1, token, True)
        drawn.append(token)
    return torch.cat(drawn, dim=-1)


def _last_positive(weights: Tensor) -> Tensor:
    places = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    return ((weights > 0) * places).amax(-1).clamp(min=1) - 1
