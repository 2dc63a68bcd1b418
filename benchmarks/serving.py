"""Keeps an engine under load and measures it in a window, after a ramp.

What is in the window counts: tokens that come in it, first tokens that come in it, requests that end in it. Requests that are
there from the beginning are met in flight (see `workload.Mix.draw_midway`), and have no time to first token.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from workload import Lengths, Mix, poisson

# A request has a time per token if it got so many after its first ones in the window; with fewer, steps' sizes would show.
FEWEST_TOKENS = 16


class Load(NamedTuple):
    """What an engine holds after a step: the share of its blocks in use, and requests."""

    usage: float
    running: int
    waiting: int


class Gain(NamedTuple):
    """What a step brought one request."""

    name: str
    tokens: int
    finished: bool


class Engine(Protocol):
    """What is asked of an engine."""

    def add(self, name: str, lengths: Lengths, random: np.random.Generator) -> None:
        """Add a request of random tokens."""

    def step(self) -> list[Gain]:
        """Run one step."""

    def load(self) -> Load:
        """Return what the engine holds."""

    def counters(self) -> dict[str, float]:
        """Return counters that only grow."""

    def abort(self, names: list[str]) -> None:
        """End requests."""


class Clock(NamedTuple):
    """Seconds, and how to let some pass."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Request:
    """A request in flight: when it came, None for those of the beginning, and its outputs in the window."""

    lengths: Lengths
    born: float | None
    first: float | None = None
    begin: float | None = None
    tokens: int = 0


class Closed:
    """A number of requests at any time: one comes when one ends."""

    def __init__(self, concurrency: int, mix: Mix, random: np.random.Generator) -> None:
        self._concurrency, self._mix, self._random = concurrency, mix, random
        self._begun = False

    def due(self, now: float, num_in_flight: int) -> Iterator[Request]:
        """Yield the requests that come now."""
        for _ in range(self._concurrency - num_in_flight):
            yield Request(self._mix.draw(self._random), now) if self._begun else self._midway()
        self._begun = True

    def wait(self, now: float) -> float:
        """Return the seconds until the next request comes by itself: some request is always in flight."""
        return 0.0

    def _midway(self) -> Request:
        return Request(self._mix.draw_midway(self._random), None)


class Poisson:
    """Requests that come when they come, whatever the engine does."""

    def __init__(self, rate: float, mix: Mix, random: np.random.Generator, start: float) -> None:
        self._mix, self._random, self._start = mix, random, start
        self._times = poisson(rate, random)
        self._next = start + next(self._times)

    def due(self, now: float, num_in_flight: int) -> Iterator[Request]:
        """Yield the requests that have come, with the times at which they did."""
        while self._next <= now:
            yield Request(self._mix.draw(self._random), self._next)
            self._next = self._start + next(self._times)

    def wait(self, now: float) -> float:
        """Return the seconds until the next request comes."""
        return max(0.0, self._next - now)


@dataclass
class Window:
    """What is seen between two times."""

    begin: float
    before: dict[str, float]
    end: float = float("nan")
    output: int = 0
    prompt: int = 0
    done: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def note(self, gain: Gain, request: Request, now: float) -> None:
        """Note what a request got; its own record is brought up to date before."""
        self.output += gain.tokens
        if request.first == now:
            self.prompt += request.lengths.prompt
            if request.born is not None:
                self.ttft.append(now - request.born)
        if request.begin is None:
            request.begin = now
        else:
            request.tokens += gain.tokens
        if gain.finished:
            self.done += 1
            if request.tokens >= FEWEST_TOKENS:
                self.tpot.append((now - request.begin) / request.tokens)


class Point(NamedTuple):
    """One point of a sweep.

    Attributes:
        arrivals: "closed", at a level of so many requests at any time, or "poisson", of so many a second.
        level: See above.
        ramp: Seconds before the window.
        seconds: Of the window.
        seed: Decides requests and arrivals.
    """

    arrivals: str
    level: float
    ramp: float
    seconds: float
    seed: int = 0


def measure(engine: Engine, point: Point, mix: Mix, max_num_seqs: int, clock: Clock | None = None) -> dict[str, Any]:
    """Return what the engine does under the load of a point; it is empty afterwards."""
    clock = clock or Clock()
    random = np.random.default_rng([point.seed, round(1000 * point.level)])
    start = clock.now()
    if point.arrivals == "closed":
        source: Closed | Poisson = Closed(int(point.level), mix, random)
    else:
        source = Poisson(point.level, mix, random, start)
    flying, window = _serve(engine, source, point, random, clock)
    after = engine.counters()
    gained = {name: after[name] - window.before.get(name, 0) for name in after}
    ages = [window.end - x.born for x in flying.values() if x.first is None and x.born is not None]
    engine.abort(list(flying))
    return _row(window, gained, max(ages, default=0.0), max_num_seqs)


def _serve(
    engine: Engine, source: Closed | Poisson, point: Point, random: np.random.Generator, clock: Clock
) -> tuple[dict[str, Request], Window]:
    flying: dict[str, Request] = {}
    window, count, start = None, 0, clock.now()
    while True:
        now = clock.now()
        if window is not None and window.loads and now >= window.begin + point.seconds:
            window.end = now
            return flying, window
        for request in source.due(now, len(flying)):
            # Unlike those of other points: what an engine still says of these is not about them.
            name = f"{point.arrivals}-{point.level:g}-{point.seed}-{count}"
            count += 1
            flying[name] = request
            engine.add(name, request.lengths, random)
        if not flying:
            clock.sleep(source.wait(now))
            continue
        gains = engine.step()
        now = clock.now()
        for gain in gains:
            _note(gain, flying, window, now)
        if window is not None:
            load, ended = engine.load(), sum(gain.finished for gain in gains)
            # Those that this step ended were running in it.
            window.loads.append(load._replace(running=load.running + ended))
        elif now >= start + point.ramp:
            window = Window(now, engine.counters())


def _note(gain: Gain, flying: dict[str, Request], window: Window | None, now: float) -> None:
    request = flying[gain.name]
    if request.first is None and gain.tokens:
        request.first = now
    if window is not None and gain.tokens:
        window.note(gain, request, now)
    if gain.finished:
        del flying[gain.name]


def _row(window: Window, gained: dict[str, float], oldest: float, max_num_seqs: int) -> dict[str, Any]:
    seconds = window.end - window.begin
    queued = sum(load.waiting > 0 and load.running < max_num_seqs for load in window.loads)
    drafts = gained.get("spec_decode_num_drafts", 0)
    return {
        "seconds": seconds,
        "steps": len(window.loads),
        "requests_done": window.done,
        "output_tokens_per_s": window.output / seconds,
        "total_tokens_per_s": (window.output + window.prompt) / seconds,
        "ttft_ms": _spread(window.ttft),
        "oldest_waiting_ms": 1e3 * oldest,
        "tpot_ms": _spread(window.tpot),
        "peak_kv_percent": 100 * max(load.usage for load in window.loads),
        "peak_running": max(load.running for load in window.loads),
        "peak_waiting": max(load.waiting for load in window.loads),
        "queued_share": queued / len(window.loads),
        "preemptions": int(gained.get("num_preemptions", 0)),
        "accepted_per_step": 1 + gained["spec_decode_num_accepted_tokens"] / drafts if drafts else None,
    }


def _spread(seconds: list[float]) -> dict[str, Any]:
    """Return the number of samples and percentiles in milliseconds, None if there are none."""
    p50, p99 = (1e3 * np.percentile(seconds, [50, 99])).tolist() if seconds else (None, None)
    return {"count": len(seconds), "p50": p50, "p99": p99}
