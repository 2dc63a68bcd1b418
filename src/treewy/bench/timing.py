"""Interleaved rounds and what they say: a machine that slows down slows every variant down."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from treewy.errors import RequestError

R = TypeVar("R")


class Spread(NamedTuple):
    """Median and range of one figure over the rounds, and the figure of each round."""

    median: float
    low: float
    high: float
    rounds: list[float]

    @classmethod
    def of(cls, figures: Iterable[float]) -> "Spread":
        """Return the spread of at least one figure."""
        rounds = list(figures)
        return cls(statistics.median(rounds), min(rounds), max(rounds), rounds)


def interleave(
    variants: Mapping[str, Callable[[], R]], num_rounds: int, advance: Callable[[], None] = lambda: None
) -> dict[str, list[R]]:
    """Run every variant once per round, in turn; each round starts with the next variant.

    Args:
        variants: What to run, by name.
        num_rounds: Times each is run.
        advance: Called after every run, for a progress bar.

    Raises:
        RequestError: there is no round to run.
    """
    if num_rounds < 1:
        raise RequestError(f"A benchmark must run at least one round; got {num_rounds}. 5 is a good number.")
    names = list(variants)
    results: dict[str, list[R]] = {name: [] for name in names}
    for number in range(num_rounds):
        # Turned by one each time: no variant always runs after the same neighbour.
        turn = number % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            results[name].append(variants[name]())
            advance()
    return results


def ratio(of: Spread, to: Spread) -> Spread:
    """Return the spread of round-by-round ratios, so that a slow spell of the machine cancels."""
    return Spread.of(a / b if b else 0.0 for a, b in zip(of.rounds, to.rounds, strict=True))
