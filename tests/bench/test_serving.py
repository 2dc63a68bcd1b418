"""What a benchmark's load measures, against an engine whose every step is known."""

import numpy as np
import pytest
from loads import START, Slow
from serving import FEWEST_TOKENS, Point, measure
from workload import Lengths, Mix, mix, poisson

MIX = Mix((20, 0.5), (40, 0.5), 400)
RAMP, SECONDS = 4.0, 20.0


def closed(engine, concurrency, *, seconds=SECONDS, max_num_seqs=256, lengths=MIX):
    return measure(engine, Point("closed", concurrency, RAMP, seconds), lengths, max_num_seqs, engine.clock)


def first_tokens(engine):
    """Return when each request got its first token."""
    times = {}
    for time, name, _, _ in engine.log:
        times.setdefault(name, time)
    return times


def born(engine):
    """Return when each request came, those of the beginning left out."""
    return {name: time for time, name, _ in engine.added if time > START}


def inside(time):
    return START + RAMP < time <= START + RAMP + SECONDS


def test_so_many_requests_are_in_flight_at_every_step():
    engine = Slow(slots=8)
    closed(engine, 5)
    assert set(engine.met) == {5}
    assert len(engine.added) > 20


def test_tokens_of_the_window_count():
    engine = Slow(slots=8)
    row = closed(engine, 5)
    tokens = sum(tokens for time, _, tokens, _ in engine.log if inside(time))
    prompts = {name: lengths.prompt for _, name, lengths in engine.added}
    read = sum(prompts[name] for name, time in first_tokens(engine).items() if inside(time))
    assert (row["seconds"], row["steps"]) == (SECONDS, SECONDS / 0.25)
    assert row["output_tokens_per_s"] == tokens / SECONDS
    assert row["total_tokens_per_s"] == (tokens + read) / SECONDS
    assert row["requests_done"] == sum(finished for time, *_, finished in engine.log if inside(time)) > 20


def test_first_tokens_of_the_window_are_timed_from_when_their_requests_came():
    """Those of the beginning, which came all at once, have no such time."""
    engine = Slow(slots=2)
    row = closed(engine, 4)
    waits = [time - born(engine)[name] for name, time in first_tokens(engine).items() if inside(time) and name in born(engine)]
    assert len(waits) > 8
    assert row["ttft_ms"]["count"] == len(waits)
    assert row["ttft_ms"]["p50"] == pytest.approx(1000 * np.median(waits))
    assert row["ttft_ms"]["p99"] == pytest.approx(1000 * np.percentile(waits, 99))
    # Two are served and two wait, so that each waits for about two others.
    assert row["ttft_ms"]["p50"] > 3000


def test_who_waits_at_the_end_has_waited_so_long():
    engine = Slow(slots=1, tokens=1)
    row = closed(engine, 3, lengths=Mix((20, 0.1), (39, 0.1), 400))
    assert row["ttft_ms"] == {"count": 0, "p50": None, "p99": None}
    waiting = [name for name in engine.ended if name in born(engine) and name not in first_tokens(engine)]
    assert row["oldest_waiting_ms"] == 1000 * (START + RAMP + SECONDS - min(born(engine)[name] for name in waiting)) > 10_000


def test_nobody_waits_where_all_are_served():
    assert closed(Slow(slots=8), 5)["oldest_waiting_ms"] == 0


def test_time_per_token_is_that_of_requests_that_end_in_the_window():
    row = closed(Slow(slots=8, tokens=5), 5)
    assert 0 < row["tpot_ms"]["count"] < row["requests_done"]
    assert row["tpot_ms"]["p50"] == pytest.approx(1000 * 0.25 / 5, rel=0.1)
    # The last step of a request may bring less, by up to 4 of at least 16.
    assert row["tpot_ms"]["p99"] <= 1000 * 0.25 / 5 * 1.25


def test_time_per_token_leaves_out_requests_of_few_tokens():
    short = Mix((20, 0.1), (FEWEST_TOKENS, 0.0), 400)
    assert closed(Slow(slots=8), 5, lengths=short)["tpot_ms"]["count"] == 0
    assert closed(Slow(slots=8), 5, lengths=short)["requests_done"] > 20


def test_time_before_the_window_is_no_time_per_token():
    """The beginning is slow, for all come at once; what it makes of a request must not show."""

    class Begins(Slow):
        def step(self):
            self.step_seconds = 2.0 if not self.met else 0.25
            return super().step()

    long = Mix((20, 0.1), (60, 0.1), 400)
    row = closed(Begins(slots=8, tokens=5), 5, lengths=long)
    assert row["tpot_ms"]["p99"] <= 1000 * 0.25 / 5 * 1.25


def test_queues_for_memory_and_queues_for_places():
    """Requests that wait because all places are taken say nothing of memory, also after a step that ends one."""
    row = closed(Slow(slots=2), 4)
    assert (row["queued_share"], row["peak_running"], row["peak_waiting"]) == (1.0, 2, 2)
    row = closed(Slow(slots=2), 4, max_num_seqs=2)
    assert (row["queued_share"], row["peak_running"], row["peak_waiting"]) == (0.0, 2, 2)
    assert closed(Slow(slots=8), 5)["queued_share"] == 0


def test_peak_use_and_counters_are_those_of_the_window():
    row = closed(Slow(slots=8), 5)
    assert row["peak_kv_percent"] == 100 * 5 / 8
    assert row["preemptions"] == 2 * row["steps"]
    assert row["accepted_per_step"] == 2.5


def test_a_point_leaves_nothing_behind_and_its_names_are_its_own():
    engine = Slow(slots=2)
    for point in (Point("closed", 4, 1.0, 2.0, 1), Point("closed", 4, 1.0, 2.0), Point("closed", 3, 1.0, 2.0)):
        measure(engine, point, MIX, 256, engine.clock)
        assert not engine.running
        assert not engine.waiting


def poisson_run(engine, rate, seconds=SECONDS):
    return measure(engine, Point("poisson", rate, RAMP, seconds), MIX, 256, engine.clock)


def test_requests_that_come_by_themselves_are_timed_from_then():
    """Not from the end of the step in which they came; and nothing is stepped while there are none."""
    engine = Slow(slots=8, tokens=20, step_seconds=1.0)
    row = poisson_run(engine, 0.3)
    assert engine.slept > 0
    assert 0 not in engine.met
    assert row["seconds"] == pytest.approx(SECONDS, abs=1.0)
    assert row["ttft_ms"]["count"] > 2
    # A step, and what was left of the one before, if there was one.
    assert 1000 <= row["ttft_ms"]["p50"] < row["ttft_ms"]["p99"] < 2000
    assert row["ttft_ms"]["p99"] % 1000 > 1


def test_requests_that_meet_an_idle_engine_wait_for_nothing():
    engine = Slow(slots=8, tokens=400, step_seconds=1.0)
    row = poisson_run(engine, 0.02, 2000)
    assert engine.added[0][0] > START
    assert row["ttft_ms"]["count"] == pytest.approx(40, abs=12)
    assert row["ttft_ms"]["p50"] == pytest.approx(1000)


def test_the_rate_is_the_rate():
    engine = Slow(slots=1000)
    poisson_run(engine, 16.0)
    assert len(engine.added) == pytest.approx(16 * (RAMP + SECONDS), rel=0.15)


@pytest.mark.parametrize(("arrivals", "level"), [("closed", 4), ("poisson", 2.0)])
def test_every_engine_meets_the_same_requests(arrivals, level):
    fast, slow = Slow(slots=8), Slow(slots=1, step_seconds=0.5)
    for engine in (fast, slow):
        measure(engine, Point(arrivals, level, RAMP, SECONDS), MIX, 256, engine.clock)
    many = min(len(fast.added), len(slow.added))
    assert many > 4
    assert [x[1:] for x in fast.added[:many]] == [x[1:] for x in slow.added[:many]]
    assert list(fast.prompts.values())[:many] == list(slow.prompts.values())[:many]
    other = Slow(slots=8)
    measure(other, Point(arrivals, level, RAMP, SECONDS, seed=1), MIX, 256, other.clock)
    assert [x[2] for x in other.added[:many]] != [x[2] for x in fast.added[:many]]


def test_a_load_is_steady_from_the_start():
    """With requests met in flight the first seconds end as many as any others."""
    engine = Slow(slots=1000)
    closed(engine, 300, seconds=40)
    ends = [time for time, *_, finished in engine.log if finished]
    rates = [sum(begin < time - START <= begin + 8 for time in ends) / 8 for begin in (0, 8, 16, 24, 32)]
    assert max(rates) / min(rates) < 1.15


def test_lengths_are_like_those_of_sharegpt():
    """As the benchmarks of vLLM and sglang report: 227 and 230 tokens of prompt, 188 and 203 generated."""
    random = np.random.default_rng(0)
    drawn = [mix("sharegpt", 4096).draw(random) for _ in range(20_000)]
    assert np.mean([x.prompt for x in drawn]) == pytest.approx(225, rel=0.03)
    assert np.mean([x.output for x in drawn]) == pytest.approx(196, rel=0.03)
    assert min(min(x) for x in drawn) >= 1
    assert max(x.prompt + x.output for x in drawn) <= 4096


def test_lengths_fit_short_contexts():
    random = np.random.default_rng(0)
    drawn = [draw(random) for _ in range(2000) for draw in (mix("sharegpt", 64).draw, mix("sharegpt", 64).draw_midway)]
    assert max(x.prompt + x.output for x in drawn) == 64
    assert min(min(x) for x in drawn) >= 1


def test_requests_met_in_flight_are_longer_ones():
    """The mean of what they are to generate in all is that of lengths weighted by themselves."""
    random = np.random.default_rng(0)
    law = Mix((50, 0.0), (100, 0.5), 10**9)
    fresh = np.array([law.draw(random).output for _ in range(20_000)])
    met = [law.draw_midway(random) for _ in range(20_000)]
    biased = (fresh**2).mean() / fresh.mean()
    assert np.mean([x.prompt - 50 + x.output for x in met]) == pytest.approx(biased, rel=0.03)
    assert np.mean([x.prompt - 50 for x in met]) == pytest.approx(biased / 2, rel=0.03)


def test_lengths_are_what_they_say():
    assert Mix((85, 0.0), (120, 0.0), 10**9).draw(np.random.default_rng(0)) == Lengths(85, 120)
    times = [time for time, _ in zip(poisson(4.0, np.random.default_rng(0)), range(4000), strict=False)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.05)
