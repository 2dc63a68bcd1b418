"""Long outputs under ring: thousands of steps leave the state as close to exact as plain decoding would.

Every step verifies a fresh tree and commits a short path of it, mostly not its deepest. Plain decoding walks the committed
tokens in float32 and rounds its state to the pool's dtype once per token; the exact state is the float64 walk of them.
"""

import numpy as np
import torch

from ops.checks import geometric_mean, relative
from ops.problems import unit_keys
from tolerances import DRIFT_FACTOR
from toy_steps import current_state
from treewy.cache import LinearSpec
from treewy.cache.layer import LinearLayer
from treewy.cache.policy import Ring
from treewy.ops.gdn import reference
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

STEPS, EVERY, DIM, DRAWS = 2048, 64, 8, 16
KEYS = ("equal", "nearly equal", "ordinary")
TREES = [
    DraftTree.chain(3),
    DraftTree.from_widths([2, 2]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree.chain(14),
    DraftTree([-1]),
]


def steps(seed: int):
    """Yield (tree, operands, path) of every step; heads are DRAWS draws of each kind of keys.

    Equal and nearly equal keys come with gates of 1, a strong gate now and then, and beta up to 2; ordinary ones with
    ordinary gates and beta up to 1.
    """
    rng, heads = np.random.default_rng(seed), DRAWS * len(KEYS)
    equal, near, ordinary = (slice(DRAWS * i, DRAWS * (i + 1)) for i in range(3))
    key = unit_keys(rng, 1, heads, DIM, 1.0)
    for step in range(STEPS):
        tree = TREES[step % len(TREES)]
        shape = (tree.num_rows, heads)
        keys, gates, beta = unit_keys(rng, *shape, DIM, 0.0), np.zeros(shape), rng.uniform(0.0, 2.0, shape)
        keys[:, equal] = key[:, equal]
        keys[:, near] = 0.98**0.5 * key[:, near] + 0.02**0.5 * keys[:, near]
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        gates[:, ordinary] = -np.log1p(np.exp(rng.normal(-2.5, 1.0, gates[:, ordinary].shape)))
        if step % 37 == 0:
            gates[0, : 2 * DRAWS : 2] = rng.choice([-20.0, -100.0, -200.0])
        beta[:, ordinary] /= 2
        queries = unit_keys(rng, *shape, DIM, 0.0) * DIM**-0.5
        operands = reference.Rows(queries, keys, rng.normal(size=(*shape, DIM)), gates, beta)
        path = tree.path(int(rng.integers(min(tree.num_rows, 8)))) if rng.random() < 0.9 else []
        yield tree, operands.astype(np.float32), path


def walk(rows: reference.Rows, state: np.ndarray) -> np.ndarray:
    """Return the state after a chain of rows, in their dtype."""
    return reference.walk(rows, state, tuple(range(-1, len(rows.v) - 1)))[1][-1]


class Decoders:
    """One sequence decoded under ring, and plainly: from one state, over the same tokens, in one state dtype."""

    def __init__(self, state: torch.Tensor, dtype: torch.dtype) -> None:
        heads, self.policy, self.slots = len(state), Ring(), torch.tensor([0])
        spec, rows = LinearSpec(heads, heads, DIM, DIM, 1, 2), self.policy.num_history_rows
        self.layer = LinearLayer(spec, 1, dtype=dtype, state_dtype=dtype, device="cpu", num_history_rows=rows)
        self.layer.state[0] = self.plain = state.to(dtype)
        self.num_folds = 0

    def step(self, tree: DraftTree, rows: reference.Rows, path: list[int]) -> None:
        packed, held = pack([tree]), int(self.layer.history.lengths[0])
        q, k, v, g, beta = map(torch.from_numpy, rows)
        record = self.policy.verify(self.layer, q, k, v, g, beta, self.slots, packed, torch.float32).record
        self.policy.commit(self.layer, self.slots, record, pack_paths(packed, [path]))
        self.num_folds += int(self.layer.history.lengths[0]) < held + len(path)
        for token in path:
            after = walk(reference.Rows(*(x[token : token + 1] for x in rows)), self.plain.float().numpy())
            self.plain = torch.from_numpy(after).to(self.plain.dtype)

    def ratios(self, exact: np.ndarray) -> np.ndarray:
        """Return the ring's error over the plain walk's, for each kind of keys."""
        states = current_state(self.layer, 0), self.plain
        errors = [np.split(relative(state.double().numpy(), exact, 0), len(KEYS)) for state in states]
        ours, walks = ([geometric_mean(of_kind) for of_kind in error] for error in errors)
        return np.divide(ours, walks)


def test_drift_over_2048_steps() -> None:
    """At every 64th step, for every kind of keys, the state's error is at most DRIFT_FACTOR times the walk's."""
    state = torch.from_numpy(np.random.default_rng(1).normal(size=(DRAWS * len(KEYS), DIM, DIM))).bfloat16().float()
    decoders = {dtype: Decoders(state, dtype) for dtype in (torch.float32, torch.bfloat16)}
    exact, ratios = state.double().numpy(), {dtype: [] for dtype in decoders}
    for step, (tree, rows, path) in enumerate(steps(3), start=1):
        for decoder in decoders.values():
            decoder.step(tree, rows, path)
        if path:
            exact = walk(reference.Rows(*(x[path] for x in rows)).astype(np.float64), exact)
        if step % EVERY == 0:
            for dtype, decoder in decoders.items():
                ratios[dtype].append(decoder.ratios(exact))
    for dtype, decoder in decoders.items():
        assert STEPS // 12 < decoder.num_folds < STEPS // 3
        worst, last = np.max(ratios[dtype], axis=0), np.mean(ratios[dtype][-8:], axis=0)
        print(f"{dtype}, times the walk's error, {KEYS} keys: worst {worst.round(2)}, last 512 steps {last.round(2)}")
        assert (worst <= DRIFT_FACTOR).all(), np.round(ratios[dtype], 2)
