"""Acceptance of draft trees by chance, as vLLM has it for chains: for measuring speed with weights that say nothing."""

import numpy as np
import torch

from treewy.errors import RequestError
from treewy.packed import TreeTables
from treewy.shapes import Int, Tensor
from treewy.tree import DraftTree

# What vLLM calls it.
SYNTHETIC = "synthetic"


class Synthetic:
    """Accepts so many drafts of each depth, any child.

    Args:
        tree: What each request drafts.
        rates: For each depth the chance that a path which got there goes on.
        num_ids: Token ids that there are.
        device: Of the engine.
    """

    def __init__(self, tree: DraftTree, rates: list[float], num_ids: int, device: torch.device | str) -> None:
        """Seed the same numbers in every process: those of a tensor parallel engine must agree."""
        counts = np.array([len(tree.children(row)) for row in range(tree.num_rows)])
        first = np.array([min(tree.children(row), default=0) for row in range(tree.num_rows)])
        chances = np.append(np.asarray(rates), 0.0)[tree.depth]
        self._widest, self._num_ids = counts.max(), num_ids
        self._counts, self._first = (torch.from_numpy(table).to(device) for table in (counts, first))
        self._chances = torch.from_numpy(chances).to(device)
        self._generator = torch.Generator(device=device).manual_seed(0)

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What is written once and read ever after."""
        return {"child_counts": self._counts, "first_children": self._first, "chances": self._chances}

    def override(self, tables: TreeTables, drafts: Int[Tensor, "N"], choices: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """Return the choices as chance has them: a child's token, or one that no child has.

        Args:
            tables: The trees, breadth first.
            drafts: Token of each row.
            choices: The target's token after each row.
        """
        row = torch.arange(len(choices), device=choices.device)
        start = tables.cu_rows[:-1][tables.seq_of_row.long().clamp(min=0)].long()
        ends = tables.cu_rows[1:][tables.seq_of_row.long().clamp(min=0)].long()
        local = row - start
        coins = torch.rand(2, len(choices), generator=self._generator, device=choices.device, dtype=torch.float64)
        child = start + self._first[local] + (coins[0] * self._counts[local]).long()
        goes_on = (coins[1] < self._chances[local]) & (child < ends) & (self._counts[local] > 0)
        taken = drafts[child.clamp(max=len(drafts) - 1)]
        other = self._other(start + self._first[local], self._counts[local], drafts, choices)
        return torch.where(goes_on & (taken >= 0), taken, other)

    def _other(self, first: Tensor, counts: Tensor, drafts: Tensor, choices: Tensor) -> Tensor:
        """Return a token for each row that none of its children has: its choice, or one of the next ids."""
        along = torch.arange(int(self._widest) + 1, device=choices.device)
        held = drafts[(first[:, None] + along[:-1]).clamp(max=len(drafts) - 1)]
        held = torch.where(along[:-1] < counts[:, None], held, -1)
        tried = (choices[:, None] + along) % self._num_ids
        free = (tried[:, :, None] != held[:, None, :]).all(-1)
        return tried.gather(1, free.int().argmax(1, keepdim=True))[:, 0].to(choices.dtype)


def depth_rates(rates: list[float], max_depth: int) -> list[float]:
    """Return the chance that a path goes on at each depth, from how often paths are to reach the one behind it.

    Args:
        rates: vLLM's, of positions of a chain as long as the tree has drafts.
        max_depth: Levels of drafts of the tree.

    Raises:
        RequestError: paths are to be longer than the tree is deep.
    """
    if any(rates[max_depth:]):
        raise RequestError(
            f"Synthetic acceptance must be of paths that the tree has; it is {1 + sum(rates):.4g} tokens per step, or has rates "
            f"behind position {max_depth}, and the tree has {max_depth} levels. Ask for {max_depth + 1} tokens at most."
        )
    before = [1.0, *rates]
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates[:max_depth], before, strict=False)]
