"""Reported faults of gates, solves, masks, strides and sizes, each tried on the implementation that runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.checks import KINDS, check_algebra
from ops.problems import make
from toy_steps import make_pool, start, verify
from treewy.errors import ShapeError
from treewy.model import ToyTarget
from treewy.ops import attention, gdn
from treewy.ops.gdn import eager
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

both_kinds = pytest.mark.parametrize("kind", KINDS)


def check_deepest(problem, kind: str = "record") -> None:
    """Outputs and the state after each tree's last row equal the walk."""
    paths = [DraftTree(shape).path(len(shape) - 1) for shape in problem.tree.shapes]
    check_algebra(problem, pack_paths(problem.tree, paths), kind)


@both_kinds
@pytest.mark.parametrize("gate", [-30.0, -200.0])
def test_tiny_decays(kind: str, gate: float) -> None:
    """Fault F01: eight tokens of log decay -30, or of -200, whose product no float64 holds: no 0 x inf."""
    problem = make([DraftTree.chain(7)], gate_one=True)
    problem.g[:] = gate
    check_deepest(problem, kind)


@both_kinds
@pytest.mark.parametrize("gate", [-60.0, -1000.0])
def test_decays_of_unrelated_branches(kind: str, gate: float) -> None:
    """Fault F02: one branch decays by e^-60, or e^-1000, its sibling hardly: their ratio is never taken."""
    problem = make([DraftTree([-1, 0, 0, 1, 2])], gate_one=True)
    problem.g[:, :] = torch.tensor([-0.01, gate, -0.01, gate, -0.01])[:, None]
    check_deepest(problem, kind)


@pytest.mark.parametrize("solver", ["levels", "triangular"])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_equal_keys_and_gates_of_one(num_rows: int, beta: float, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F06: nothing decays and all keys are one key: both solvers of eager substitute, no power of A is formed."""
    monkeypatch.setattr(eager, "SOLVE_TRIANGULAR_DEPTH", 1 if solver == "triangular" else 1000)
    hard = {"correlation": 1.0, "beta": (beta, beta), "gate_one": True}
    check_deepest(make([DraftTree.chain(num_rows - 1)], heads=1, group=1, key_dim=8, value_dim=3, **hard))


@both_kinds
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 65])
def test_sums_of_gates_over_many_rows(kind: str, tile: int, beyond: int) -> None:
    """Fault F15: sizes around those at which tiles end; what came before is never forgotten, in a chain or a tree."""
    size = tile + beyond
    two_arms = DraftTree([-1, 0, 0, *range(1, size - 2)])
    problem = make([DraftTree.chain(size - 1), two_arms], heads=1, group=2, key_dim=4, value_dim=3)
    # Gates near 1, or all that is old would have decayed from sight.
    problem.g[:] *= 0.01
    check_deepest(problem, kind)


@both_kinds
@pytest.mark.parametrize(
    ("value_heads", "key_heads"), [(16, 16), (32, 16), (48, 16), (64, 16), (24, 8), (12, 4), (1, 1), (3, 1)]
)
def test_pairs_of_head_counts(kind: str, value_heads: int, key_heads: int) -> None:
    """Fault K04: every multiple works, not those of a list."""
    problem = make(
        [DraftTree([-1, 0, 0, 0, 3])], heads=key_heads, group=value_heads // key_heads, key_dim=4, value_dim=3
    )
    check_deepest(problem, kind)


def test_head_counts_that_do_not_divide() -> None:
    """Fault K04, the other side: refused, and said why."""
    problem = make([DraftTree.chain(2)], heads=2, group=2)
    with pytest.raises(ShapeError, match="multiple of key heads; got HV=4, H=3"):
        gdn.verify(*problem._replace(q=problem.q[:, [0, 0, 1]], k=problem.k[:, [0, 0, 1]]))


@both_kinds
def test_gates_that_are_views_of_a_wide_parent(kind: str) -> None:
    """Fault K12: gates as a slice of a tensor of 200,000 columns; its stride is the parent's."""
    problem = make([DraftTree.chain(3)], heads=2, group=2)
    parents = [torch.full((4, 200_000), torch.nan, dtype=torch.float64) for _ in range(2)]
    views = [parent[:, 150_000:150_004] for parent in parents]
    for view, own in zip(views, (problem.g, problem.beta), strict=True):
        view[:] = own
    check_deepest(problem._replace(g=views[0], beta=views[1]), kind)


def test_a_step_holds_rows_of_its_own_and_not_of_every_slot() -> None:
    """Fault J02: what a step keeps per row scales with the rows that draft, whatever the pool's size."""
    target, chain = ToyTarget(seed=6), DraftTree.chain(3).with_tokens([1, 2, 3, 4])
    held = {}
    for num_slots in (2, 40):
        for commit in ("store_all", "reconstruct"):
            pool = make_pool(target, commit, num_slots=num_slots)
            slot = start(target, pool, [5, 9])
            held[num_slots, commit] = verify(target, pool, [chain], [slot]).pending.bytes()
    assert held[2, "store_all"] == held[40, "store_all"]
    assert held[2, "reconstruct"] == held[40, "reconstruct"]


class Masks(TorchDispatchMode):
    """Notes the size of every mask that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
            self.sizes.append(out.numel())
        return out


def test_no_mask_has_the_contexts_length() -> None:
    """Fault J07: masks are of a tree's rows squared, however much is committed."""
    context, trees = 4096, [DraftTree.from_widths([3, 4, 4])] * 3
    tree = pack(trees)
    rows, places = torch.zeros(tree.num_rows, 1, 2), torch.zeros(3, context, 1, 2)
    with Masks() as masks:
        attention.verify(rows, rows, rows, places, places, torch.arange(3), [context] * 3, tree, scale=1.0)
    assert masks.sizes
    assert max(masks.sizes) <= 64 * 64
    assert tree.ancestors.numel() == 3 * 64 * 64


@pytest.mark.parametrize("num_heads", [1, 3])
def test_gates_of_one_row(num_heads: int) -> None:
    """Fault F07: raw gates of +-0.5 and +-200, one row at a time: finite, and those of the whole batch."""
    values = torch.tensor([-200.0, -0.5, 0.5, 200.0])
    a, b = (x.reshape(-1, 1).expand(-1, num_heads) for x in torch.meshgrid(values, values, indexing="ij"))
    zeros = torch.zeros(num_heads)
    whole = gdn.finish_gates(a, b, zeros, zeros)
    assert all(part.isfinite().all() for part in whole)
    for row in range(len(a)):
        one = gdn.finish_gates(a[row : row + 1], b[row : row + 1], zeros, zeros)
        assert all(torch.equal(part[0], rows[row]) for part, rows in zip(one, whole, strict=True))
