"""Rung 1: the closed form of docs/theory.md against the recurrence, one token at a time, in NumPy float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from ops.checks import assert_close
from ops.problems import SHAPES, make, problems
from tolerances import EXACT, FLOAT32_ULP
from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.tree import DraftTree


def check_definition(problem):
    """Closed form and rebuilt states equal the walk at every node."""
    parents = problem.tree.shapes[0]
    rows, state = problem.rows(0), problem.committed(0)
    o, states = reference.walk(rows, state, parents)
    form = reference.closed_form(rows, state, parents)
    assert_close(form.o, o, EXACT)
    for node in range(len(parents)):
        path = DraftTree(parents).path(node)
        rebuilt = reference.rebuild(state, form.u[path], rows.k[path], form.log_decay[path])
        assert_close(rebuilt, states[node], EXACT)


@given(problems(max_rows=24))
def test_closed_form_equals_walk(problem):
    check_definition(problem)


@pytest.mark.parametrize("strong_gate", [0.0, -20.0, -100.0, -200.0])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("depth", [15, 31, 63])
def test_fault_f06_gate_one_and_equal_keys(depth, beta, strong_gate):
    """Fault F06: with no decay and like keys the solve's powers grow."""
    hard = {"correlation": 1.0, "beta": (beta, beta), "gate_one": True, "strong_gate": strong_gate}
    check_definition(make([DraftTree.chain(depth)], heads=1, group=1, key_dim=8, value_dim=3, **hard))


def test_hand_example():
    """K = V = 1, no committed state, (alpha, beta, k, v) = (.9, .5, 1, 2), (.9, .5, 1, 3), (.9, .5, 1, 1)."""
    v = np.array([2.0, 3.0, 1.0]).reshape(3, 1, 1)
    ones, halves, gates = np.ones((3, 1, 1)), np.full((3, 1), 0.5), np.full((3, 1), math.log(0.9))
    rows, state, chain = reference.Rows(ones, ones, v, gates, halves), np.zeros((1, 1, 1)), (-1, 0, 1)
    o, states = reference.walk(rows, state, chain)
    form = reference.closed_form(rows, state, chain)
    assert form.u.ravel() == pytest.approx([1, 1.05, -0.3775], abs=EXACT)
    assert states.ravel() == pytest.approx([1, 1.95, 1.3775], abs=EXACT)
    assert o.ravel() == pytest.approx([1, 1.95, 1.3775], abs=EXACT)
    assert form.o.ravel() == pytest.approx([1, 1.95, 1.3775], abs=EXACT)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_hand_example_through_the_op(backend):
    problem = make([DraftTree.chain(2)], heads=1, group=1, key_dim=1, value_dim=1)
    problem = problem._replace(
        q=torch.ones(3, 1, 1, dtype=torch.float64),
        k=torch.ones(3, 1, 1, dtype=torch.float64),
        v=torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64).reshape(3, 1, 1),
        g=torch.full((3, 1), math.log(0.9), dtype=torch.float64),
        beta=torch.full((3, 1), 0.5, dtype=torch.float64),
        state=torch.zeros(1, 1, 1, 1, dtype=torch.float64),
    )
    verified = problem.verify(backend=backend)
    assert verified.o.flatten().tolist() == pytest.approx([1, 1.95, 1.3775], abs=EXACT)
    assert verified.record.u.flatten().tolist() == pytest.approx([1, 1.05, -0.3775], abs=EXACT)


def test_fault_f02_decays_of_unrelated_branches_never_meet():
    """Fault F02: one branch decays by e^-60, its sibling hardly; their ratio would be e^+60."""
    problem = make([DraftTree([-1, 0, 0, 1, 2])], gate_one=True)
    problem.g[:, :] = torch.tensor([-0.01, -60.0, -0.01, -60.0, -0.01])[:, None]
    check_definition(problem)


def test_fault_f01_tiny_decays_are_differences_of_logs():
    """Fault F01: a log decay of -30 per token over 8 tokens made 0 x inf."""
    problem = make([DraftTree.chain(7)], gate_one=True)
    problem.g[:] = -30.0
    check_definition(problem)


class TestGates:
    def test_fault_f09_epsilon_is_added_to_the_sum(self):
        """Fault F09: adding the epsilon to the mean is 128 times more of it."""
        x = torch.full((1, 1, 128), 1e-4, dtype=torch.float64)
        expected = 1e-4 / math.sqrt(128 * 1e-8 + 1e-6)
        assert gdn.l2_normalise(x).flatten().tolist() == pytest.approx([expected] * 128, rel=EXACT)

    def test_queries_are_scaled_after_the_norm(self):
        x = torch.randn(5, 2, 16, dtype=torch.float64)
        assert torch.allclose(gdn.scale_queries(x), gdn.l2_normalise(x) / 4, rtol=EXACT)

    def test_zero_rows_stay_zero(self):
        assert not gdn.l2_normalise(torch.zeros(2, 1, 4)).any()

    def test_fault_f08_the_sigmoid_is_not_rounded_to_the_model_dtype(self):
        """Fault F08: beta rounded to bfloat16 and back before the state update."""
        a, b = torch.zeros(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 0.5, dtype=torch.bfloat16)
        _, beta = gdn.finish_gates(a, b, torch.zeros(1), torch.zeros(1))
        assert beta.dtype == torch.float32
        assert beta.item() == pytest.approx(0.62245935, rel=FLOAT32_ULP)

    def test_fault_f05_softplus_of_a_large_gate(self):
        """Fault F05: exp(x) overflows for x > 88, and the decay became 0."""
        g, _ = gdn.finish_gates(
            torch.full((1, 1), 60.0), torch.zeros(1, 1), torch.full((1,), -5.0), torch.full((1,), 40.0)
        )
        assert g.item() == pytest.approx(-100 * math.exp(-5), rel=FLOAT32_ULP)

    @pytest.mark.parametrize("num_heads", [1, 3, 7])
    def test_fault_f07_gates_are_finite_and_exact(self, num_heads):
        """Fault F07: a fused gate sometimes gave NaN on large inputs."""
        values = torch.tensor([-200.0, -0.5, 0.5, 200.0])
        a = values[:, None].expand(4, num_heads)
        g, beta = gdn.finish_gates(a, a, torch.zeros(num_heads), torch.zeros(num_heads))
        wide_g, wide_beta = gdn.finish_gates(
            a.double(), a.double(), torch.zeros(num_heads).double(), torch.zeros(num_heads).double()
        )
        assert torch.allclose(g.double(), wide_g, rtol=FLOAT32_ULP, atol=1e-38)
        assert torch.allclose(beta.double(), wide_beta, rtol=FLOAT32_ULP, atol=1e-38)
        assert (g <= 0).all()

    def test_beta_may_reach_two(self):
        a = torch.full((1, 1), 30.0)
        _, beta = gdn.finish_gates(a, a, torch.zeros(1), torch.zeros(1), beta_scale=2.0)
        assert beta.item() == 2.0


def test_shapes_cover_both_solvers():
    depths = [tree.max_depth for tree in SHAPES.values()]
    assert min(depths) == 0
    assert any(0 < depth < 12 for depth in depths)
    assert any(depth >= 12 for depth in depths)
