"""Accuracy and drift: the yardsticks are what they say, and a kernel that is worse misses its bar."""

import numpy as np
import pytest
import torch

from bench.ops_tools import SMALL, eager, setting
from tolerances import DRIFT_FACTOR, SUBSTITUTION_FACTOR
from treewy.bench.ops import Heads
from treewy.bench.ops.accuracy import committed, make_chain, mean_error, yardsticks
from treewy.bench.ops.drift import Drift, Mode, measure_drift
from treewy.bench.ops.precision import accuracy_results, drift_results
from treewy.bench.ops.rows import EXACT, FAST

HEADS = Heads(4, 8, 32, 16)
SEQUENTIAL, SEQUENTIAL_BF16 = "sequential fp32", "sequential bf16 state"


@pytest.fixture(scope="module")
def chains():
    return {keys: make_chain(keys, "cpu", heads=HEADS) for keys in ("ordinary", "hard")}


def test_hard_keys_are_hard(chains):
    x = chains["hard"].x
    keys = torch.nn.functional.normalize(x.k.float(), dim=-1)
    assert (keys[1:] * keys[:-1]).sum(-1).mean() > 0.95
    from treewy.ops.gdn import finish_gates

    g, beta = finish_gates(x.a, x.b, x.a_log, x.dt_bias, beta_scale=x.beta_scale)
    assert g.exp().min() == 1
    assert beta.min() == beta.max() == 2
    assert len(x.v) == 64


@pytest.mark.parametrize("keys", ["ordinary", "hard"])
def test_yardsticks_differ_as_they_must(chains, keys):
    """In units of their roundoff all ways are sane; where keys are hard, the closed form in float32 loses to the walk."""
    chain = chains[keys]
    errors = {name: mean_error(state, chain.exact) for name, state in yardsticks(chain).items()}
    assert 2e-8 < errors[SEQUENTIAL] < 2e-6
    assert 1e-3 < errors[SEQUENTIAL_BF16] < 2e-2
    assert 5e-4 < errors["fp32 inverse applied in bf16"] < 2e-2
    worse = errors["fp32 substitution"] / errors[SEQUENTIAL]
    assert worse > 3 if keys == "hard" else worse < 3


def test_the_eager_rule_passes_every_bar(chains):
    for keys, chain in chains.items():
        before = chain.state.clone()
        errors = {
            exact: mean_error(committed(eager, "", chain, torch.float32, exact=exact), chain.exact)
            for exact in (True, False)
        }
        assert errors[True] <= SUBSTITUTION_FACTOR * mean_error(yardsticks(chain)["fp32 substitution"], chain.exact)
        assert errors[True] == errors[False] < 1e-6, keys
        assert torch.equal(chain.state, before)
    got = list(accuracy_results(setting(), HEADS))
    assert [bar.verdict for result in got for bar in result.bars] == ["pass"] * 6
    assert {result.name for result in got} == {EXACT, FAST, *yardsticks(chains["hard"])}


def test_a_record_in_bfloat16_misses_the_exact_bars():
    def rounding(*args, **options):
        out = eager(*args, **options)
        out.record.u.copy_(out.record.u.bfloat16())
        return out

    got = [result for result in accuracy_results(setting(rounding), SMALL) if result.name == EXACT]
    assert [bar.verdict for result in got for bar in result.bars] == ["miss", "miss"]


MODES = [
    Mode(policy, exact, state)
    for policy in ("ring", "reconstruct")
    for exact, state in ((True, torch.float32), (False, torch.bfloat16))
]


def test_drift_of_the_eager_rule():
    ticks = []
    drift = measure_drift(eager, "", MODES, "cpu", num_steps=64, every=16, heads=SMALL, advance=lambda: ticks.append(1))
    assert len(ticks) == 64
    assert all(errors.shape == (4, 2) for errors in drift.errors.values())
    for mode in MODES:
        name = f"{mode.policy}: {mode.name}"
        if mode.exact:
            assert drift.worst_over(name, SEQUENTIAL) <= DRIFT_FACTOR
        else:
            assert drift.errors[name].max() < 2e-2
            assert drift.growth_over(name, SEQUENTIAL_BF16) <= DRIFT_FACTOR
    assert drift.errors[SEQUENTIAL].max() < 1e-6


def test_an_open_loop_drifts():
    """Each step's pseudo-values a little too large: nothing forgets it where gates are 1."""

    def leaning(*args, **options):
        out = eager(*args, **options)
        out.record.u.mul_(1 + 1e-5)
        return out

    drift = measure_drift(leaning, "", MODES[:1], "cpu", num_steps=32, every=16, heads=SMALL)
    assert drift.worst_over("ring: treewy exact, float32 state", SEQUENTIAL) > 5 * DRIFT_FACTOR


def test_ratios_of_drift():
    drift = Drift({"a": np.array([[1.0, 2.0], [3.0, 2.0]]), "b": np.array([[1.0, 1.0], [1.0, 2.0]])})
    assert drift.worst_over("a", "b") == 3.0
    assert drift.growth_over("a", "b") == 3.0


def test_rows_of_drift(monkeypatch):
    errors = {
        f"{policy}: treewy {kind} state": [[1e-7], [3e-7]]
        for policy in ("ring", "reconstruct")
        for kind in ("exact, float32", "fast, float32", "fast, bfloat16")
    }
    errors |= {SEQUENTIAL: [[5e-8], [5e-8]], SEQUENTIAL_BF16: [[1e-3], [1e-3]]}
    monkeypatch.setattr(
        "treewy.bench.ops.precision.measure_drift", lambda *_, **__: Drift({k: np.array(v) for k, v in errors.items()})
    )
    got = list(drift_results(setting()))
    assert [bar.verdict for result in got for bar in result.bars] == ["miss"] * 6
    # Exact mode by its worst checkpoint, fast mode by how it grew.
    errors["ring: treewy exact, float32 state"][0][0] = 4e-7
    worst, growth = (result.bars[0].value for result in list(drift_results(setting()))[:2])
    assert (worst, growth) == (pytest.approx(8.0), pytest.approx(3.0))
    assert (got[0].error, got[0].note) == (3e-7, "first checkpoint 1.0e-07")
    assert got[-1].bars == []
