"""Problems: named shapes, rotated sets that share nothing, and steps that follow from each other."""

import itertools

import numpy as np
import pytest
import torch

from bench.ops_tools import SMALL, eager, small
from treewy.bench.ops import make_problem, variant
from treewy.bench.ops.correctness import prior_rows, rebuilt, walked
from treewy.bench.ops.cycle import CAPACITY
from treewy.bench.ops.shapes import path_of, spine, tree_of, trees_of
from treewy.bench.ops.timing import L2_BYTES, num_sets
from treewy.errors import RequestError


def test_named_shapes():
    assert [tree_of(name).num_rows for name in ("chain1", "chain4", "tree15", "tree40", "spine64")] == [
        1,
        4,
        15,
        40,
        64,
    ]
    assert tree_of("spine64").max_depth == 16
    assert spine(2, 1).parents == (-1, 0, 0, 1)
    assert len({tree.num_rows for tree in trees_of("ragged", 6)}) == 6
    for bad in ("chain0", "chain", "tree16", "ring", "chain-1"):
        with pytest.raises(RequestError, match="chainN"):
            tree_of(bad)


def test_accepted_paths_end_at_leaves_where_they_can():
    tree = tree_of("spine64")
    path = path_of(tree, 4)
    assert len(path) == 4
    assert not tree.children(path[-1])
    assert path_of(tree_of("chain1"), 4) == [0]
    case = small("reconstruct", "chain4", 2000)
    lengths = [len(path) for path in case.paths]
    assert set(lengths) == {3, 4}
    assert abs(np.mean(lengths) - 3.24) < 0.05


@pytest.mark.parametrize("policy", ["ring", "reconstruct", "cycle"])
def test_sets_share_nothing_they_move(policy):
    problem = make_problem(small(policy, "chain4", 3), "cpu", sets=4)
    first = problem.steps[:4]
    assert sorted(int(slot) for step in first for slot in step.slots) == list(range(12))
    for part in ("rows", "out"):
        tensors = [getattr(step, part)[0] for step in first]
        assert len({x.data_ptr() for x in tensors}) == 4
    assert not any(torch.equal(a.rows.q, b.rows.q) for a, b in itertools.pairwise(first))
    again = make_problem(small(policy, "chain4", 3), "cpu", sets=4)
    assert torch.equal(again.state, problem.state)
    assert torch.equal(again.steps[-1].rows.v, problem.steps[-1].rows.v)


def test_enough_sets_to_leave_l2_cold():
    assert num_sets(1e9) == 2
    assert num_sets(1e6) * 1e6 >= 3 * L2_BYTES


def test_bytes_of_a_sequence():
    """State 4*8*8, history 16*(4*8 + 2*8 + 2*4), records 4*(4*8 + 2*8 + 2*4), all float32, and one length."""
    assert make_problem(small("ring", "chain4", 3), "cpu", sets=2).bytes_per_seq == 4 * (256 + 16 * 56 + 4 * 56 + 1)
    assert make_problem(small("reconstruct", "chain4", 3), "cpu", sets=2).bytes_per_seq == 4 * (256 + 4 * 56)


def test_work_of_a_call():
    """Three chains of 4: a state each and 8 history rows; two states and the accepted rows; what the steps really do."""
    assert make_problem(small("ring", "chain4", 3), "cpu", sets=2).work == (3, 12, 24)
    case = small("reconstruct", "chain4", 3)
    assert make_problem(case, "cpu", sets=2).work == (6, 12, sum(map(len, case.paths)))
    problem, read = make_problem(small("cycle", "chain4", 3), "cpu", sets=2), 0
    for step in problem.steps:
        held = step.prior.history.lengths[step.slots.long()]
        moved = torch.where(step.prior.fold != 0, 0, step.prior.path.lengths)
        read += int((held + step.prior.path.lengths + moved).sum())
    assert problem.work == pytest.approx((3 + _folds(problem) / len(problem.steps), 12, read / len(problem.steps)))


def test_a_cycle_is_one_decoding():
    """Step by step, what pool, history and pending path stand for is the walk of all that was accepted.

    Log decays are kept in float32, and in float64 arithmetic there is no low part.
    """
    problem = make_problem(small("cycle", "chain4", 2, torch.float64), "cpu", sets=2)
    chosen, folds = variant(eager, "triton"), 0
    for number in range(problem.num_sets):
        for seq in range(2):
            slot = int(problem.steps[number].slots[seq])
            first = problem.steps[number]
            state = rebuilt(problem.state[slot], prior_rows(first.prior, seq, slot))
            for step in problem.steps[number :: problem.num_sets]:
                lengths, pending = int(step.prior.history.lengths[slot]), int(step.prior.path.lengths[seq])
                assert bool(step.prior.fold[seq]) == (lengths + pending > CAPACITY)
                folds += int(step.prior.fold[seq])
                got = rebuilt(problem.state[slot], prior_rows(step.prior, seq, slot))
                torch.testing.assert_close(got, state, rtol=1e-5, atol=1e-6)
                chosen.run(problem, step._replace(slots=torch.where(torch.arange(2) == seq, step.slots, -1)))
                x = step.rows._replace(**{n: getattr(step.rows, n)[seq * 4 : seq * 4 + 4] for n in "qkvab"})
                following = _next(problem, step)
                if following is not None:
                    state = walked(x, state, (-1, 0, 1, 2))[1][int(following.prior.path.lengths[seq]) - 1]
    assert folds > 8
    assert problem.work.num_states == pytest.approx(2 + _folds(problem) / len(problem.steps))


def _next(problem, step):
    place = next(i for i, other in enumerate(problem.steps) if other is step) + problem.num_sets
    return problem.steps[place] if place < len(problem.steps) else None


def _folds(problem):
    return sum(int(step.prior.fold.sum()) for step in problem.steps)


def test_the_case_is_the_layer_of_the_35b():
    from treewy.bench.ops import Case

    assert Case("ring", "chain4", 1).heads == (16, 32, 128, 128)
    assert SMALL.num_value_heads == 2 * SMALL.num_heads
