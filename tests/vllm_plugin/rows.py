"""A layer and an engine small enough to follow: requests that join, verify chains or trees, accept and leave."""

import numpy as np
import torch

from treewy.ops import gdn
from treewy.tree import DraftTree
from treewy.vllm_plugin.check import Checker
from treewy.vllm_plugin.memory import Memory, Sizes
from treewy.vllm_plugin.step import Drafted, Step

HEADS, VALUE_HEADS, DIM, LAYERS = 2, 4, 16, 3


def sizes(kept_rows: int, *, requests: int = 8, step_rows: int = 4, max_path: int | None = None) -> Sizes:
    """Return sizes of a worker with a few small layers."""
    return Sizes(
        num_layers=LAYERS,
        num_requests=requests,
        step_rows=step_rows,
        kept_rows=kept_rows,
        max_path=step_rows if max_path is None else max_path,
        num_step_rows=requests * step_rows + 3,
        num_heads=HEADS,
        num_value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        u_dtype=torch.float32,
        k_dtype=torch.float32,
    )


class Engine:
    """Runs layers on random rows as the plugin does, with a checker beside them.

    Args:
        kept_rows: Rows that a request may keep.
        seed: Of the rows.
        poison: Whether what was never written is NaN.
        tree: What requests draft; chains of 3 by default.
    """

    def __init__(self, kept_rows: int, *, seed: int = 0, poison: bool = True, tree: DraftTree | None = None) -> None:
        given = {} if tree is None else {"step_rows": tree.num_rows, "max_path": tree.max_depth + 1}
        self.memory = Memory(sizes(kept_rows, **given), "cpu")
        if poison:  # nothing may be read that was not written
            for part in (*self.memory.step, *self.memory.kept[:4]):
                part.fill_(torch.nan)
        self.step, self.checker = Step(self.memory, "eager", tree), Checker(1)
        self.random = torch.Generator().manual_seed(seed)
        self.states = self.normal(LAYERS, 9, VALUE_HEADS, DIM, DIM) * 0.3
        self.gates = self.normal(VALUE_HEADS), self.normal(VALUE_HEADS)
        self.outputs: list[torch.Tensor] = []

    def normal(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(*shape, generator=self.random)

    def forget(self, request: int) -> None:
        """Let another request have an index."""
        self.step.forget(request)
        self.checker.forget(request)

    def run(
        self,
        requests: list[int],
        slots: list[int] | list[list[int]],
        rows: list[int],
        sampled: list[int],
        *,
        padding: int = 0,
        paths: list[list[int]] | None = None,
    ) -> None:
        """Run a step: verify, then accept of each the root and `sampled` - 1 drafts; slots of all layers or of each.

        Drafts are the first of each request, or those on `paths`, local to its tree.
        """
        drafted = Drafted(np.arange(len(requests)), np.array(requests, np.int32), np.array(rows, np.int32))
        total = sum(rows)
        self.step.begin(drafted, len(requests) + padding, total + padding)
        tables = self.step.tables
        assert tables is not None
        of_layers = slots if isinstance(slots[0], list) else [slots] * LAYERS
        for layer in range(LAYERS):
            at = torch.tensor([*of_layers[layer], *[-1] * padding], dtype=torch.int32)
            x = gdn.Projections(
                *(self.normal(total + padding, heads, DIM) for heads in (HEADS, HEADS, VALUE_HEADS)),
                *(self.normal(total + padding, VALUE_HEADS) for _ in range(2)),
                *self.gates,
            )
            kept = self.memory.kept.layer(layer)
            self.checker.observe(layer, x, self.states[layer], at, kept, tables.places, tables.tree.cu_rows)
            out = gdn.Verified(torch.empty_like(x.v), self.memory.step_of(layer, total + padding))
            prior = gdn.Prior(kept, None, None, tables.fold, places=tables.places)
            gdn.commit_verify(x, self.states[layer], at, tables.tree, prior=prior, out=out, backend="eager")
            self.outputs.append(out.o[:total].clone())
        lengths = [max(1, count) for count in sampled]
        self.checker.accept(requests, paths or [range(length) for length in lengths], lengths)
        self.step.finish(torch.tensor(sampled), None if paths is None else padded(paths, self.memory.sizes.max_path))


def padded(paths: list[list[int]], places: int) -> torch.Tensor:
    """Return paths as a sampler has them: behind each end lie rows that nobody accepted."""
    table = torch.zeros(len(paths), places, dtype=torch.int32)
    for at, path in enumerate(paths):
        table[at, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return table
