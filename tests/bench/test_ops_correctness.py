"""What is wrong gets no time: each way to be wrong is seen by the check."""

import math

import pytest
import torch

from bench.ops_tools import eager, small
from treewy.bench.ops import make_problem, variant
from treewy.bench.ops.correctness import check, relative, walked
from treewy.ops.gdn import reference
from treewy.tree import DraftTree


def checked(entry, policy, shape="chain4", *, exact=True, dtype=torch.float32):
    problem = make_problem(small(policy, shape, 4, dtype), "cpu", sets=2)
    return check(variant(entry, "triton", exact=exact), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("policy", "shape"), [("ring", "ragged"), ("reconstruct", "ragged"), ("cycle", "chain4")])
def test_right_ones_pass(policy, shape, dtype):
    errors, fault = checked(eager, policy, shape, dtype=dtype)
    assert fault is None
    assert max(errors) < 4e-3
    assert min(errors.o, errors.record) > 0
    assert (errors.committed > 0) == (policy != "ring")


def spoiled(how):
    """Return the entry with one thing made wrong after it ran."""

    def entry(x, state, slots, tree, **options):
        before = state.clone()
        out = eager(x, state, slots, tree, **options)
        how(out, state, before, slots, options["prior"])
        return out

    return entry


def scale_outputs(out, *_):
    out.o.mul_(1 + 1e-4)


def lose_a_row(out, *_):
    out.o[-1] = math.nan


def scale_record(out, *_):
    out.record.u.mul_(1 + 1e-4)


def lose_decays(out, *_):
    out.record.decay_high.zero_()


def do_not_write(out, state, before, *_):
    state.copy_(before)


def write_where_nothing_folds(out, state, before, slots, prior):
    state[slots[-1]] += 1e-6


def lose_the_history(out, state, before, slots, prior):
    prior.history.u.zero_()


@pytest.mark.parametrize(
    ("how", "policy", "named"),
    [
        (scale_outputs, "ring", "o 1.0e-04"),
        (lose_a_row, "reconstruct", "o nan"),
        (scale_record, "ring", "record"),
        (lose_decays, "reconstruct", "record"),
        (do_not_write, "reconstruct", "committed"),
        (do_not_write, "cycle", "committed"),
        (write_where_nothing_folds, "ring", "committed inf"),
        (lose_the_history, "cycle", "committed"),
    ],
)
def test_wrong_ones_do_not(how, policy, named):
    assert named in checked(spoiled(how), policy).fault


def test_fast_mode_may_round_and_exact_mode_may_not():
    def rounded(out, *_):
        out.o.copy_(out.o.bfloat16())

    assert checked(spoiled(rounded), "ring", exact=False).fault is None
    assert "o " in checked(spoiled(rounded), "ring", exact=True).fault


def test_the_judge_is_the_walk():
    """The float64 walk of the check, against the definition in NumPy."""
    problem = make_problem(small("reconstruct", "tree15", 1), "cpu", sets=2)
    step, parents = problem.steps[0], DraftTree.from_widths([2, 2, 2]).parents
    from treewy.ops.gdn import finish_gates, l2_normalise, scale_queries

    x = step.rows._replace(**{name: getattr(step.rows, name).double() for name in (*"qkvab", "a_log", "dt_bias")})
    g, beta = finish_gates(x.a, x.b, x.a_log, x.dt_bias)
    q, k = (part.repeat_interleave(2, dim=1) for part in (scale_queries(x.q), l2_normalise(x.k)))
    rows = reference.Rows(*(part.numpy() for part in (q, k, x.v, g, beta)))
    state = problem.state[int(step.slots[0])]
    want_o, want_states = reference.walk(rows, state.double().numpy(), parents)
    o, states = walked(step.rows, state, parents)
    assert relative(torch.from_numpy(want_o), o) < 1e-12
    assert relative(torch.from_numpy(want_states), states) < 1e-12
