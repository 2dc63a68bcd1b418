"""Lengths and arrivals of requests, seeded: the same for every engine that is compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import numpy as np


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Mix:
    """Lognormal lengths, independent of each other: the median, and the standard deviation of the logarithm.

    Attributes:
        prompt: Of prompts.
        output: Of what is generated.
        longest: Prompt and output together are cut to this; a prompt to half of it.
    """

    prompt: tuple[float, float]
    output: tuple[float, float]
    longest: int

    def draw(self, random: np.random.Generator) -> Lengths:
        """Return the lengths of one request."""
        prompt = min(max(4, _lognormal(random, self.prompt)), self.longest // 2)
        return Lengths(prompt, min(max(1, _lognormal(random, self.output)), self.longest - prompt))

    def draw_midway(self, random: np.random.Generator) -> Lengths:
        """Return the lengths of a request that is met in flight: what it has generated counts as prompt.

        The longer a request, the likelier it is met, and anywhere between its ends. A server that begins with these is at
        once as it would be after a long time.
        """
        median, sigma = self.output
        whole = Mix(self.prompt, (median * exp(sigma**2), sigma), self.longest).draw(random)
        done = int(random.integers(whole.output))
        return Lengths(whole.prompt + done, whole.output - done)


def mix(name: str, longest: int) -> Mix:
    """Return a mix by name.

    Args:
        name: "sharegpt": like the ShareGPT conversations that vLLM's and sglang's benchmarks send. Means of about 225 and 195
            tokens, as they report (227 and 188 over 2,000 requests, sglang issue 1639; 230 and 203 over 1,000, vLLM pull request
            18566); the shape is ours.
        longest: The model's longest context.
    """
    return {"sharegpt": Mix((93, 1.4), (120, 1.0), longest)}[name]


def poisson(rate: float, random: np.random.Generator) -> Iterator[float]:
    """Yield the seconds at which requests come, without end."""
    at = 0.0
    while True:
        at += random.exponential(1 / rate)
        yield at


def _lognormal(random: np.random.Generator, law: tuple[float, float]) -> int:
    median, sigma = law
    return round(median * exp(sigma * random.standard_normal()))
