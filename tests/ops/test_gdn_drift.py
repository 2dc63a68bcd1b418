"""Long outputs: hundreds of steps of rejected drafts leave the state as close to exact as plain decoding would.

Every step verifies a fresh tree and commits a short path of it. Plain decoding walks the committed tokens in float32 and
rounds its state to the pool's dtype once per token; the exact state is the float64 walk of the same tokens.
"""

import numpy as np
import pytest
import torch

from ops.checks import KINDS, geometric_mean, relative
from ops.problems import unit_keys
from tolerances import DRIFT_FACTOR
from treewy.ops.gdn import reference
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

STEPS, EVERY, DIM = 512, 64, 16
STRONG_GATES = (0.0, -20.0, -100.0, -200.0)
DRAWS_PER_GATE = 16
TREES = [
    DraftTree.chain(32),
    DraftTree.from_widths([3, 3, 3]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree.chain(3),
    DraftTree([-1, 0, 0, *range(1, 24)]),
]


class Plain:
    """Plain decoding: a float32 walk whose state is rounded to the pool's dtype after every token."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    def decode(self, rows: reference.Rows) -> None:
        for token in range(len(rows.v)):
            one = reference.Rows(*(x[token : token + 1] for x in rows))
            _, states = reference.walk(one, self.state.float().numpy(), (-1,))
            self.state = torch.from_numpy(states[0]).to(self.state.dtype)


def steps(seed, policy):
    """Yield (tree, operands, path) of every step: equal keys, gate 1, beta up to 2, one strong gate per root path."""
    rng = np.random.default_rng(seed)
    strong = np.repeat(STRONG_GATES, DRAWS_PER_GATE)
    lowest = np.tile([0.0, 2.0], len(strong) // 2)  # beta: uniform up to 2, or exactly 2
    key = unit_keys(rng, 1, len(strong), DIM, 1.0)
    for step in range(STEPS):
        tree = TREES[step % len(TREES)]
        shape = (tree.num_rows, len(strong))
        gates = np.zeros(shape)
        gates[tree.depth == step // len(TREES) % (tree.max_depth + 1)] = strong
        operands = (
            unit_keys(rng, *shape, DIM, 0.0) * DIM**-0.5,
            np.broadcast_to(key, (*shape, DIM)),
            rng.normal(size=(*shape, DIM)),
            gates,
            rng.uniform(lowest, 2.0, shape),
        )
        last = 0 if policy == "root only" else int(rng.integers(tree.num_rows))
        yield tree, reference.Rows(*(x.astype(np.float32) for x in operands)), tree.path(last)


@pytest.mark.parametrize("policy", ["root only", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_drift_of_rejected_drafts(kind, dtype, policy):
    """Faults A06, A12, F11: the state drifted with the number of rejects, faster than plain decoding's."""
    heads, slots = len(STRONG_GATES) * DRAWS_PER_GATE, torch.tensor([0])
    pool = torch.from_numpy(np.random.default_rng(1).normal(size=(1, heads, DIM, DIM))).to(dtype)
    exact, plain, failures = pool[0].double().numpy(), Plain(pool[0]), []
    for step, (tree, rows, path) in enumerate(steps(2, policy), start=1):
        packed = pack([tree])
        verified = KINDS[kind].verify(*map(torch.from_numpy, rows), pool, slots, packed)
        KINDS[kind].commit(pool, slots, verified.record, pack_paths(packed, [path]))
        taken = reference.Rows(*(x[path] for x in rows))
        plain.decode(taken)
        exact = reference.walk(taken.astype(np.float64), exact, tuple(range(-1, len(path) - 1)))[1][-1]
        if step % EVERY == 0:
            errors = [relative(state.double().numpy(), exact, 0) for state in (pool[0], plain.state)]
            for gate, *of_gate in zip(STRONG_GATES, *(x.reshape(-1, DRAWS_PER_GATE) for x in errors), strict=True):
                ours, walk = map(geometric_mean, of_gate)
                if ours > DRIFT_FACTOR * walk:
                    failures.append(f"step {step}, gate {gate}: error {ours:.2e}, {ours / walk:.2f} times the walk's")
    assert not failures, "\n".join(failures)
