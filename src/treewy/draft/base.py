"""The Drafter port, and the drafter that drafts nothing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from treewy.draft.shape import Shape
from treewy.sampling import Law, Stream
from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree


class Committed(NamedTuple):
    """Rows of one sequence that a step has just committed.

    Attributes:
        slot: The sequence's slot, the same in the target's cache and the drafter's.
        hidden: The target's hidden states of the rows, after its final norm.
        tokens: The token after each row; of the last row, the newest token, which is the next step's root.
        first: The first row's own token; those of the others are in `tokens`.
    """

    slot: int
    hidden: Float[Tensor, "P hidden"]
    tokens: Sequence[int]
    first: int


class Draws(NamedTuple):
    """How a sequence wants its drafts drawn: from this law of the drafter's logits, with these numbers."""

    law: Law
    stream: Stream


class Root(NamedTuple):
    """A sequence that wants a draft.

    Attributes:
        slot: Its slot.
        token: Its newest token.
        shape: The shape to fill, or the budget to spend.
        draws: None asks for the most likely children; else a fixed shape gets drawn ones, of a drafter that can draw. A
            budget's children are always chosen: a tree that takes its shape from tokens that were drawn would bias the
            text. There the law only says how likely the request makes them, and the stream is left alone.
    """

    slot: int
    token: int
    shape: Shape
    draws: Draws | None = None


class Draft(NamedTuple):
    """A proposed tree, and how its tokens came about.

    Attributes:
        tree: The tree, root token first.
        laws: For each row whose children were drawn, one after the other without replacement: the law of the first.
            Rows that are missing had theirs chosen. A law that is not the true one spoils the text, not just the draft.
    """

    tree: DraftTree
    laws: Mapping[int, Float[Tensor, "vocab"]] = MappingProxyType({})


class Drafter(ABC):
    """Proposes trees. Wrong drafts cost time, never correctness.

    A drafter that draws uses the root's stream alone, and as much of it as this sequence's own tree needs: what a request
    decodes must not depend on its neighbours.
    """

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
    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """Return one draft per root, in order.

        A draft is any tree in level order, root token first, with at most the rows and the depth of the shape asked for.
        """


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, as steps of one row."""

    def allocate(self, slot: int) -> None:
        """See `Drafter.allocate`."""

    def free(self, slot: int) -> None:
        """See `Drafter.free`."""

    def observe(self, committed: Sequence[Committed]) -> None:
        """See `Drafter.observe`."""

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """Return the root alone."""
        return [Draft(DraftTree([-1], [root.token])) for root in roots]
