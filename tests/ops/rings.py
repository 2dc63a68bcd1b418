"""Sequences that live in a checkpoint and a history, beside the states that walking their tokens gives."""

from collections.abc import Sequence

import numpy as np
import torch

from ops.checks import Errors, assert_close, relative, walked
from ops.problems import Problem
from tolerances import EXACT
from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree


def empty_history(
    state: torch.Tensor, num_heads: int, num_rows: int, dtype: torch.dtype | None = None, fill: float = torch.nan
) -> gdn.History:
    """Return a history of no rows for a pool; its unused rows hold `fill`."""
    slots, value_heads, value_dim, key_dim = state.shape
    dtype = dtype or state.dtype
    return gdn.History(
        torch.full((slots, num_rows, value_heads, value_dim), fill, dtype=dtype),
        torch.full((slots, num_rows, num_heads, key_dim), fill, dtype=dtype),
        torch.full((slots, num_rows, value_heads), fill, dtype=dtype),
        torch.full((slots, num_rows, value_heads), fill, dtype=dtype),
        torch.zeros(slots, dtype=torch.int64),
    )


def folded(state: torch.Tensor, history: gdn.History, backend: str | None = None) -> torch.Tensor:
    """Return the pool that folding every slot would leave, and leave both as they are."""
    state, history = state.clone(), gdn.History(*(part.clone() for part in history))
    gdn.fold(state, torch.arange(len(state)), history, backend=backend)
    assert not history.lengths.any()
    return state


class Sequences:
    """A float64 pool under test and, in `exact`, the states by the walk."""

    def __init__(self, state: torch.Tensor, num_heads: int, num_rows: int, backend: str | None = None) -> None:
        self.state, self.exact, self.backend = state.clone(), state.clone(), backend
        self.history = empty_history(state, num_heads, num_rows)

    def step(self, problem: Problem, paths: Sequence[Sequence[int]]) -> gdn.Verified:
        """Verify one step of every sequence, append the accepted paths (fold first where they do not fit), check all."""
        path, want = pack_paths(problem.tree, paths), walked(problem._replace(state=self.exact))
        problem = problem._replace(state=self.state)
        verified = problem.verify(history=self.history, backend=self.backend)
        assert_close(verified.o, want.o, EXACT)
        fits = gdn.fits(self.history, problem.slots, path)
        gdn.fold(self.state, torch.where(fits, -1, problem.slots), self.history, backend=self.backend)
        gdn.append(self.history, problem.slots, verified.record, path, backend=self.backend)
        for seq, slot in enumerate(problem.slots.tolist()):
            if slot >= 0 and paths[seq]:
                self.exact[slot] = torch.from_numpy(want.states[problem.tree.starts[seq] + paths[seq][-1]])
        self.check_states()
        return verified

    def check_states(self) -> None:
        """Check that checkpoint and history stand for the walk's states."""
        assert_close(folded(self.state, self.history, self.backend), self.exact.numpy(), EXACT)


def behind_a_chain(num_rows: int, tree: DraftTree) -> DraftTree:
    """Return a chain of `num_rows` rows with `tree` below its last one."""
    return DraftTree([*range(-1, num_rows - 1), *(parent + num_rows for parent in tree.parents)])


def errors_through_a_ring(problem: Problem, num_committed: int, *, num_rows: int = 16, at_once: int = 3) -> Errors:
    """Measure a float32 ring as `checks.arithmetic` does the op: one sequence, heads are draws.

    The first `num_committed` rows, a chain, are committed through a history, `at_once` rows in a step; the rest is one
    tree, whose deepest path is committed too. The errors are those of every row's output and of the folded state.
    """
    parents = problem.tree.shapes[0]
    deepest = int(np.argmax(DraftTree(parents).depth))
    exact_o, exact_states = reference.walk(problem.rows(0), problem.committed(0), parents)
    pool = problem.state.float()
    history = empty_history(pool, problem.k.shape[1], num_rows, torch.float32)
    outputs = []
    for start in [*range(0, num_committed, at_once), num_committed]:
        end = len(parents) if start == num_committed else min(start + at_once, num_committed)
        tree = DraftTree([max(parent - start, -1) for parent in parents[start:end]])
        last = end - 1 if start < num_committed else deepest
        packed = pack([tree])
        path = pack_paths(packed, [tree.path(last - start)])
        rows = [x[start:end] for x in problem[:5]]
        verified = gdn.verify(*rows, pool, problem.slots, packed, history=history, out_dtype=torch.float32)
        outputs.append(verified.o.numpy())
        if not gdn.fits(history, problem.slots, path).all():
            gdn.fold(pool, problem.slots, history)
        if gdn.fits(history, problem.slots, path).all():
            gdn.append(history, problem.slots, verified.record, path)
        else:
            gdn.commit(pool, problem.slots, verified.record, path)
    gdn.fold(pool, problem.slots, history)
    state = relative(pool[problem.slots[0]].numpy(), exact_states[deepest], 0)
    return Errors(relative(np.concatenate(outputs), exact_o, 1), state)
