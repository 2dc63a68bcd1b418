"""Rungs 3 and 4: the eager op in float32, against float64 on the same quantised inputs."""

import pytest
import torch

from ops.checks import (
    KINDS,
    arithmetic,
    check_against_substitution,
    check_against_walk,
    geometric_mean,
    relative,
    walked,
)
from ops.problems import SHAPES, make
from tolerances import BFLOAT16_ROUNDOFF, DRAWS, FLOAT32_FLOOR, TWO_FLOAT32, WALK_FACTOR
from treewy.ops import gdn
from treewy.packed import pack_paths
from treewy.tree import DraftTree

both_kinds = pytest.mark.parametrize("kind", KINDS)
STRONG_GATES = [0.0, -20.0, -100.0, -200.0]
DTYPES = [
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, torch.float32, id="bf16 in, fp32 state"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16 in, bf16 state"),
]


def draws(tree, dtype, state, *, key_dim=32, value_dim=16, **options):
    """Return one sequence whose heads are the draws, quantised; gates are always float32."""
    problem = make([tree], heads=DRAWS, group=1, key_dim=key_dim, value_dim=value_dim, **options)
    return problem.to(dtype, gates=torch.float32, state=state)


@both_kinds
@pytest.mark.parametrize(("dtype", "state"), DTYPES)
@pytest.mark.parametrize("strong_gate", STRONG_GATES)
@pytest.mark.parametrize("shape", ["root", "chain 3", "chain 31", "widths 3 3 3", "star 33", "scattered", "two arms"])
def test_ordinary_keys(kind, dtype, state, strong_gate, shape):
    check_against_walk(draws(SHAPES[shape], dtype, state, strong_gate=strong_gate), kind)


@both_kinds
@pytest.mark.parametrize(("dtype", "state"), DTYPES[1:])
def test_ordinary_keys_at_the_size_of_a_model(kind, dtype, state):
    check_against_walk(draws(SHAPES["widths 3 3 3"], dtype, state, key_dim=128, value_dim=32), kind)


hard_keys = pytest.mark.parametrize(
    ("correlation", "beta"),
    [
        (1.0, (1.0, 1.0)),
        (1.0, (0.0, 2.0)),
        (1.0, (2.0, 2.0)),
        (0.98, (0.0, 2.0)),
        (0.98, (2.0, 2.0)),
        (0.9, (0.0, 1.0)),
    ],
)


class TestHardKeys:
    """Equal and nearly equal keys, gate 1, beta up to 2, one strong gate per path."""

    @both_kinds
    @pytest.mark.parametrize(("dtype", "state"), DTYPES)
    @pytest.mark.parametrize("strong_gate", STRONG_GATES)
    @pytest.mark.parametrize("depth", [4, 16, 64])
    @hard_keys
    def test_chains(self, kind, dtype, state, strong_gate, depth, correlation, beta):
        hard = {"correlation": correlation, "beta": beta, "gate_one": True, "strong_gate": strong_gate}
        problem = draws(DraftTree.chain(depth), dtype, state, key_dim=16, value_dim=8, **hard)
        check_against_substitution(problem, kind)
        check_against_walk(problem, kind)  # eager's own promise: its T x T work in float64 keeps up with the walk

    @pytest.mark.parametrize(("dtype", "state"), DTYPES)
    @pytest.mark.parametrize("shape", ["widths 3 3 3", "two arms"])
    @hard_keys
    def test_trees(self, dtype, state, shape, correlation, beta):
        hard = {"correlation": correlation, "beta": beta, "gate_one": True, "strong_gate": -20.0}
        check_against_substitution(draws(SHAPES[shape], dtype, state, **hard))

    @both_kinds
    @pytest.mark.parametrize("depth", [4, 16, 64])
    @pytest.mark.parametrize("correlation", [0.98, 1.0])
    def test_the_size_of_a_model(self, kind, depth, correlation):
        """Wide keys are where float32 sums lose most: a Gram matrix, or a product with the state, term by term."""
        hard = {"correlation": correlation, "beta": (2.0, 2.0), "gate_one": True}
        problem = draws(DraftTree.chain(depth), torch.float32, torch.float32, key_dim=128, value_dim=8, **hard)
        check_against_substitution(problem, kind)
        check_against_walk(problem, kind)

    def test_walk_ratio_is_reported(self):
        hard = {"correlation": 0.98, "beta": (2.0, 2.0), "gate_one": True}
        problem = draws(DraftTree.chain(16), torch.float32, torch.float32, **hard)
        spoilt = problem._replace(beta=problem.beta * 0.999)
        measured = arithmetic(problem)
        assert geometric_mean(measured.substitution.o) > geometric_mean(measured.walk.o)
        with pytest.raises(AssertionError, match=r"ratio to the float32 walk \d+"):
            _against(problem, spoilt)


def _against(problem, spoilt):
    """Check a problem's op output, computed from spoilt operands, against the problem's own walk."""
    exact = walked(problem)
    got = spoilt.verify(out_dtype=torch.float32).o.numpy()
    op, walk = geometric_mean(relative(got, exact.o, 1)), geometric_mean(arithmetic(problem).walk.o)
    assert op <= WALK_FACTOR * walk + FLOAT32_FLOOR, f"ratio to the float32 walk {op / walk:.2f}"


class TestCast:
    """Rung 4: the real output dtype is rung 3 and one rounding."""

    @both_kinds
    @pytest.mark.parametrize(("dtype", "state"), DTYPES[1:])
    @pytest.mark.parametrize("hard", [False, True], ids=["ordinary", "hard"])
    def test_output(self, kind, dtype, state, hard):
        options = {"correlation": 1.0, "beta": (2.0, 2.0), "gate_one": True} if hard else {}
        problem = draws(SHAPES["widths 3 3 3"], dtype, state, **options)
        wide, narrow = (KINDS[kind].verify(*problem, out_dtype=out).o for out in (torch.float32, None))
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, wide.bfloat16())
        exact = torch.from_numpy(walked(problem).o)
        before_cast = (wide.double() - exact).abs().max()
        assert ((narrow.double() - exact).abs() <= before_cast + BFLOAT16_ROUNDOFF * wide.double().abs()).all()

    @both_kinds
    def test_state(self, kind):
        problem = draws(SHAPES["chain 11"], torch.bfloat16, torch.bfloat16)
        path = pack_paths(problem.tree, [list(range(12))])
        exact = torch.from_numpy(walked(problem).states[-1])
        narrow, wide = problem.state.clone(), problem.state.float()
        for pool in (narrow, wide):
            verified = KINDS[kind].verify(*problem._replace(state=pool))
            KINDS[kind].commit(pool, problem.slots, verified.record, path)
        assert torch.equal(narrow, wide.bfloat16())
        before_cast = (wide[0].double() - exact).abs().max()
        assert ((narrow[0].double() - exact).abs() <= before_cast + BFLOAT16_ROUNDOFF * wide[0].double().abs()).all()


def test_the_record_keeps_gates_that_follow_a_strong_one():
    """One float32 of -200 and less forgets decays of 1e-6; the record's two do not."""
    problem = draws(SHAPES["chain 31"], torch.float32, torch.float32, gate_one=True)
    problem.g[:] = -1e-6
    problem.g[0] = -200.0
    record = problem.verify().record
    total = record.decay_high.double() + record.decay_low.double()
    want = problem.g.double().cumsum(0)
    assert ((total - want).abs() <= TWO_FLOAT32 * want.abs()).all()
    assert record.decay_low.abs().max() > 0
    assert isinstance(record, gdn.Record)
