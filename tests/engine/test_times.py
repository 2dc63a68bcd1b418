"""Times that a generation reports, on a clock that ticks once per look."""

from itertools import count

import pytest

from treewy.draft import NoDrafter
from treewy.engine import Engine, Generation, SamplingParams
from treewy.model import ToyTarget
from treewy.tree import DraftTree


def test_rates_count_tokens_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(10)
    for module in ("session", "step"):
        monkeypatch.setattr(f"treewy.engine.{module}.perf_counter", lambda: float(next(ticks)))
    engine = Engine(ToyTarget(), NoDrafter(), shape=DraftTree([-1]))
    generation = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))[0]
    assert generation.time_to_first_token_s == 1.0
    assert generation.tokens_per_s == 1.0  # four tokens, one tick each


def test_a_stream_that_waits_to_be_read_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    for module in ("session", "step"):
        monkeypatch.setattr(f"treewy.engine.{module}.perf_counter", lambda: clock[0])
    engine = Engine(ToyTarget(), NoDrafter(), shape=DraftTree([-1]))
    stream = engine.stream([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    clock[0] = 100.0
    results: list[Generation] = []

    def drain():
        results.extend((yield from stream))

    list(drain())
    assert results[0].time_to_first_token_s == 0.0
