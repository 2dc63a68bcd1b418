"""Thousands of short steps with mixed accepts: how far the state is from the float64 walk of the accepted rows, and when."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from treewy.bench.ops.accuracy import head_errors, random_rows, walk_token
from treewy.bench.ops.correctness import prior_rows, rebuilt
from treewy.bench.ops.cycle import CAPACITY
from treewy.bench.ops.floors import QWEN_35B, Heads
from treewy.bench.ops.operands import make_history
from treewy.bench.ops.variants import Entry
from treewy.ops import gdn
from treewy.ops.gdn import Prior, Projections
from treewy.packed import PackedPath, pack, pack_paths
from treewy.shapes import Array, Float, Tensor
from treewy.tree import DraftTree

STEPS, EVERY = 2048, 64
TREES = (
    DraftTree.chain(3),
    DraftTree.from_widths([2, 2, 2]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree.chain(7),
    DraftTree.chain(0),
)
# Value heads, in turn: ordinary gates, and gates of 1, where nothing is forgotten.
GATES = ("ordinary", "gate 1")
SHUT = -100.0


@dataclass(frozen=True)
class Mode:
    """A way to run the kernels.

    Attributes:
        policy: "ring" or "reconstruct".
        exact: Whether in exact mode.
        state: Dtype of the state.
    """

    policy: str
    exact: bool
    state: torch.dtype

    @property
    def name(self) -> str:
        """What results call it."""
        return f"treewy {'exact' if self.exact else 'fast'}, {str(self.state).removeprefix('torch.')} state"


@dataclass
class Decoder:
    """One sequence as an engine would run it: pending paths, and a history that is folded when a path no longer fits."""

    entry: Entry
    backend: str
    mode: Mode
    pool: Float[Tensor, "1 HV V K"]
    num_heads: int
    prior: Prior | None = None
    num_folds: int = 0
    _slots: Tensor = field(init=False)
    _history: gdn.History | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        device = self.pool.device
        self._slots = torch.zeros(1, dtype=torch.int32, device=device)
        if self.mode.policy == "ring":
            heads = Heads(self.num_heads, self.pool.shape[1], self.pool.shape[3], self.pool.shape[2])
            lengths, draw = torch.zeros(1, dtype=torch.int32, device=device), torch.Generator(device)
            self._history = make_history(heads, 1, CAPACITY, lengths, self.pool.dtype, torch.bfloat16, draw)

    def step(self, x: Projections, path: PackedPath) -> None:
        """Verify a tree, what the last step left being taken over, and leave `path` pending."""
        out = self.entry(
            x,
            self.pool,
            self._slots,
            path.tree.tables,
            prior=self.prior,
            exact=self.mode.exact,
            backend=self.backend,
        )
        assert isinstance(out.record, gdn.Record)
        self._advance()
        fold = self._history is None or int(self._history.lengths[0]) + path.lengths[0] > CAPACITY
        flag = torch.full((1,), int(fold), dtype=torch.int32, device=self.pool.device)
        self.prior = Prior(self._history, out.record, path.tables, flag)

    def state(self) -> Float[Tensor, "HV V K"]:
        """Return the state that pool, history and pending path stand for, in float64."""
        return self.pool[0].double() if self.prior is None else rebuilt(self.pool[0], prior_rows(self.prior, 0, 0))

    def _advance(self) -> None:
        """Move the history's length over what the last call took over or folded."""
        if self.prior is None or self.prior.path is None:
            return
        folded = bool(self.prior.fold[0])
        self.num_folds += folded
        if self._history is not None:
            lengths = self._history.lengths
            lengths.copy_(torch.zeros_like(lengths) if folded else lengths + self.prior.path.lengths)


@dataclass
class Drift:
    """Errors at every `EVERY`th step, [checkpoints, gates], geometric means over the heads.

    Attributes:
        errors: By the name of a decoder or a walk.
    """

    errors: dict[str, Array]

    def worst_over(self, name: str, walk: str) -> float:
        """Return the largest ratio of errors at any checkpoint."""
        return float((self.errors[name] / self.errors[walk]).max())

    def growth_over(self, name: str, walk: str) -> float:
        """Return last over first error, in terms of the walk's own growth."""
        grown = {key: self.errors[key][-1] / self.errors[key][0] for key in (name, walk)}
        return float((grown[name] / grown[walk]).max())


WALKS = {"sequential fp32": torch.float32, "sequential bf16 state": torch.bfloat16}


def measure_drift(
    entry: Entry,
    backend: str,
    modes: list[Mode],
    device: torch.device | str,
    *,
    num_steps: int = STEPS,
    every: int = EVERY,
    heads: Heads = QWEN_35B,
    advance: Callable[[], None] = lambda: None,
) -> Drift:
    """Run every mode over the same steps, from one state.

    Args:
        entry: `treewy.ops.gdn.commit_verify`.
        backend: Which of its backends.
        modes: How to run it.
        device: Where.
        num_steps: Steps.
        every: Steps between checkpoints.
        heads: Sizes of the layer.
        advance: Called after every step, for a progress bar.
    """
    draw = torch.Generator(device).manual_seed(1)
    shape = (heads.num_value_heads, heads.value_dim, heads.key_dim)
    state = torch.randn(shape, generator=draw, device=device).bfloat16().float()
    decoders = {
        f"{mode.policy}: {mode.name}": Decoder(
            entry, backend, mode, state[None].to(mode.state, copy=True), heads.num_heads
        )
        for mode in modes
    }
    walks = {name: state.to(dtype, copy=True) for name, dtype in WALKS.items()}
    exact, errors = state.double(), {name: [] for name in (*decoders, *walks)}
    for step, (x, path) in enumerate(_steps(heads, num_steps, draw), start=1):
        for decoder in decoders.values():
            decoder.step(x, path)
        for row in path.paths[0]:
            exact = walk_token(x, row, exact)
            walks = {name: walk_token(x, row, held) for name, held in walks.items()}
        if step % every == 0:
            for name, decoder in decoders.items():
                errors[name].append(_by_gate(decoder.state(), exact))
            for name, held in walks.items():
                errors[name].append(_by_gate(held, exact))
        advance()
    return Drift({name: np.asarray(rows) for name, rows in errors.items()})


def _steps(heads: Heads, num_steps: int, draw: torch.Generator) -> Iterator[tuple[Projections, PackedPath]]:
    """Yield the rows and the accepted path of every step; any row may be the last that is accepted."""
    rng = np.random.default_rng(1)
    bias = torch.full((heads.num_value_heads,), -2.5, device=draw.device)
    bias[1 :: len(GATES)] = SHUT
    for step in range(num_steps):
        tree = TREES[step % len(TREES)]
        packed = pack([tree], device=draw.device)
        x = random_rows(heads, tree.num_rows, draw)._replace(dt_bias=bias)
        yield x, pack_paths(packed, [tree.path(int(rng.integers(tree.num_rows)))])


def _by_gate(got: Tensor, exact: Tensor) -> list[float]:
    errors = head_errors(got, exact).clamp(min=1e-30).log()
    return [float(errors[kind :: len(GATES)].mean().exp()) for kind in range(len(GATES))]
