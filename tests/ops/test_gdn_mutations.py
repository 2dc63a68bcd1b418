"""The checks can fail: each known way to get the op wrong, patched into eager, is seen by the check meant for it."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from ops.checks import check_against_substitution, check_against_walk, check_algebra
from ops.problems import SHAPES, make
from tolerances import DEEP_SOLVE_FLOAT32, DRAWS
from treewy.ops.gdn import eager
from treewy.packed import pack_paths
from treewy.tree import DraftTree

DENSE, RATIOS, SOLVE, COMMIT = eager._dense, eager.decay_ratios, eager.solve, eager.commit


def algebra():
    """Rung 2 on a branching tree with strong gates."""
    problem = make([SHAPES["widths 3 3 3"], SHAPES["scattered"]], strong_gate=-200.0)
    check_algebra(problem, pack_paths(problem.tree, [[0, 3, 12], [0, 3, 4]]))


def unrelated_decays():
    """Fault F02 in float64: ratios of unrelated rows overflow."""
    problem = make([DraftTree([-1, 0, 0, 1, 2])], gate_one=True)
    problem.g[:, :] = torch.tensor([-0.01, -1000.0, -0.01, -1000.0, -0.01])[:, None]
    check_algebra(problem, pack_paths(problem.tree, [[0, 2, 4]]))


def draws(depth, **options):
    problem = make([DraftTree.chain(depth)], heads=DRAWS, group=1, key_dim=16, value_dim=8, **options)
    return problem.to(torch.bfloat16, gates=torch.float32, state=torch.float32)


def ordinary():
    check_against_walk(draws(31))


def strong_gates():
    for strong_gate in (-20.0, -100.0, -200.0):
        check_against_walk(draws(31, strong_gate=strong_gate))


def hard():
    for correlation, beta in ((1.0, (2.0, 2.0)), (0.98, (0.0, 2.0))):
        check_against_substitution(draws(64, correlation=correlation, beta=beta, gate_one=True))


def hard_as_the_walk():
    """Eager's own promise on hard keys."""
    check_against_walk(draws(64, correlation=0.98, beta=(2.0, 2.0), gate_one=True))


def deep_levels():
    """The level solver on a float32 system deep enough for unfinished rows to overflow."""
    depth, rng = 127, np.random.default_rng(0)
    problem = make([DraftTree.chain(depth)], heads=1, group=1, gate_one=True)
    couplings = torch.full((1, 1, 1, depth + 1, depth + 1), 2.0).tril(-1)
    residual = torch.from_numpy(rng.normal(size=(1, 1, 1, depth + 1, 4))).float()
    with patch.object(eager, "SOLVE_TRIANGULAR_DEPTH", 1000):
        got = eager.solve(couplings, residual, problem.tree).double()
    want = torch.linalg.solve_triangular(couplings.double(), residual.double(), upper=False, unitriangular=True)
    assert got.isfinite().all()
    assert (got - want).abs().max() <= DEEP_SOLVE_FLOAT32 * want.abs().max()


CHECKS = {
    check.__name__: check
    for check in (algebra, unrelated_decays, ordinary, strong_gates, hard, hard_as_the_walk, deep_levels)
}


def mask_after_exp(monkeypatch):
    def ratios(log_decay, ancestors):
        return (log_decay[..., :, None] - log_decay[..., None, :]).exp() * ancestors

    monkeypatch.setattr(eager, "decay_ratios", ratios)


def no_ancestor_mask(monkeypatch):
    def ratios(log_decay, ancestors):
        return RATIOS(log_decay, torch.ones_like(ancestors).tril())

    monkeypatch.setattr(eager, "decay_ratios", ratios)


def plain_float32_gate_sum(monkeypatch):
    def dense(*operands):
        x = DENSE(*operands)
        return x._replace(log_decay=x.log_decay.float().double())

    monkeypatch.setattr(eager, "_dense", dense)


def no_low_part_in_the_record(monkeypatch):
    def commit(state, slots, record, path):
        COMMIT(state, slots, record._replace(decay_low=torch.zeros_like(record.decay_low)), path)

    monkeypatch.setattr(eager, "commit", commit)


def beta_counted_twice(monkeypatch):
    seen = []

    def dense(*operands):
        seen.append(DENSE(*operands))
        return seen[-1]

    def solve(couplings, residual, tree):
        return SOLVE(seen[-1].beta.double()[..., None] * couplings, residual, tree)

    monkeypatch.setattr(eager, "_dense", dense)
    monkeypatch.setattr(eager, "solve", solve)


def unmasked_levels(monkeypatch):
    def solve(couplings, residual, tree):
        u = residual
        for _ in range(tree.max_depth):
            u = residual - couplings @ u
        return u

    monkeypatch.setattr(eager, "solve", solve)


def neumann_squaring(monkeypatch):
    def solve(couplings, residual, tree):
        identity = torch.eye(couplings.shape[-1], dtype=couplings.dtype)
        inverse, power = identity - couplings, couplings @ couplings
        for _ in range(tree.max_depth.bit_length() - 1):
            inverse, power = inverse @ (identity + power), power @ power
        return inverse @ residual

    monkeypatch.setattr(eager, "solve", solve)


def float32_solve(monkeypatch):
    def solve(couplings, residual, tree):
        return SOLVE(couplings.float(), residual.float(), tree).to(residual.dtype)

    monkeypatch.setattr(eager, "solve", solve)


def bfloat16_solve_matrix(monkeypatch):
    def solve(couplings, residual, tree):
        return SOLVE(couplings.bfloat16().to(couplings.dtype), residual, tree)

    monkeypatch.setattr(eager, "solve", solve)


def bfloat16_solve(monkeypatch):
    def solve(couplings, residual, tree):
        narrow, depth = couplings.bfloat16(), tree.depth_dense[:, None, None, :, None]
        u = torch.where(depth == 0, residual, 0).bfloat16()
        for level in range(1, tree.max_depth + 1):
            u = torch.where(depth <= level, residual.bfloat16() - narrow @ u, 0)
        return u.to(residual.dtype)

    monkeypatch.setattr(eager, "solve", solve)


@pytest.mark.parametrize("check", CHECKS)
def test_the_checks_pass(check):
    CHECKS[check]()


@pytest.mark.parametrize(
    ("mutation", "check"),
    [
        (mask_after_exp, "unrelated_decays"),
        (no_ancestor_mask, "algebra"),
        (plain_float32_gate_sum, "strong_gates"),
        (plain_float32_gate_sum, "algebra"),
        (no_low_part_in_the_record, "strong_gates"),
        (beta_counted_twice, "algebra"),
        (beta_counted_twice, "ordinary"),
        (unmasked_levels, "deep_levels"),
        (neumann_squaring, "hard"),
        (neumann_squaring, "deep_levels"),
        (float32_solve, "hard_as_the_walk"),
        (bfloat16_solve_matrix, "ordinary"),
        (bfloat16_solve, "ordinary"),
        (bfloat16_solve, "hard"),
    ],
)
def test_a_mutation_is_seen(monkeypatch, mutation, check):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_neumann_squaring_hides_behind_ordinary_keys(monkeypatch):
    """Why hard keys are tested: the unstable solver passes on random ones."""
    neumann_squaring(monkeypatch)
    CHECKS["ordinary"]()
