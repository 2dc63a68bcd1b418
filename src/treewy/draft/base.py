"""The Drafter port, and the drafter that drafts nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree


class Committed(NamedTuple):
    """Rows of one sequence that a step has just committed.

    Attributes:
        slot: The sequence's slot, the same in the target's cache and the drafter's.
        hidden: The target's hidden states of the rows, after its final norm.
        tokens: The token after each row; of the last row, the newest token, which is the next step's root.
    """

    slot: int
    hidden: Float[Tensor, "P hidden"]
    tokens: Sequence[int]


class Root(NamedTuple):
    """A sequence that wants a draft: its slot, its newest token and the shape to fill."""

    slot: int
    token: int
    shape: DraftTree


class Drafter(ABC):
    """Proposes trees. Wrong drafts cost time, never correctness."""

    @abstractmethod
    def allocate(self, slot: int) -> None:
        """Start a sequence in `slot`."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Forget the sequence in `slot`; a slot that was never started is none of its business."""

    @abstractmethod
    def observe(self, committed: Sequence[Committed]) -> None:
        """Take in what a step committed: every row of every sequence, exactly once and in order."""

    @abstractmethod
    def propose(self, roots: Sequence[Root]) -> list[DraftTree]:
        """Return one tree per root, of the shape asked for or a prefix of it, root token first."""


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, as steps of one row."""

    def allocate(self, slot: int) -> None:
        """See `Drafter.allocate`."""

    def free(self, slot: int) -> None:
        """See `Drafter.free`."""

    def observe(self, committed: Sequence[Committed]) -> None:
        """See `Drafter.observe`."""

    def propose(self, roots: Sequence[Root]) -> list[DraftTree]:
        """Return the root alone."""
        return [DraftTree([-1], [root.token]) for root in roots]
