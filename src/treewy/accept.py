"""Acceptance rules: which drafts stand, and which token follows them. Pure; randomness is an argument."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from treewy.errors import ShapeError
from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree


class Accepted(NamedTuple):
    """The outcome of one step for one sequence.

    Attributes:
        path: Rows to commit, root first. As many as `tokens`: the state after them lacks the last token, which is the
            next step's root.
        tokens: The accepted drafts, then one token of the target's own.
        is_bonus: Whether the last token follows a leaf (bonus) or replaces drafts that were rejected (recovered).
    """

    path: list[int]
    tokens: list[int]
    is_bonus: bool

    def cut(self, num_tokens: int) -> "Accepted":
        """Return the outcome that delivers only the first `num_tokens` tokens, committed rows included."""
        if num_tokens >= len(self.tokens):
            return self
        return Accepted(self.path[:num_tokens], self.tokens[:num_tokens], False)


@runtime_checkable
class Coin(Protocol):
    """A source of uniform numbers in [0, 1)."""

    def __call__(self) -> float:
        """Return the next number."""
        ...


Rule = Callable[[DraftTree, Tensor, Coin | None], Accepted]


def greedy(tree: DraftTree, logits: Float[Tensor, "T vocab"], coin: Coin | None = None) -> Accepted:
    """Accept the drafts that equal the target's most likely token; ties go to the lowest id, as argmax breaks them.

    The tokens are those of decoding without drafts, whatever the drafts were. `coin` is not tossed.
    """
    del coin
    if logits.shape[0] != tree.num_rows:
        raise ShapeError(
            f"logits must have one row per tree row, {tree.num_rows}; got {logits.shape[0]}. "
            "Pass the rows of this sequence only."
        )
    return walk_choices(tree, logits.argmax(dim=-1).tolist())


def walk_choices(tree: DraftTree, choices: Sequence[int]) -> Accepted:
    """Follow the target's choice at each row as long as a child holds it.

    Args:
        tree: The draft, with tokens.
        choices: The target's token after each row.
    """
    if tree.tokens is None:
        raise ShapeError("A draft must hold tokens to be accepted; got a bare shape. Use tree.with_tokens(ids).")
    row, path, tokens = 0, [0], []
    while True:
        token = int(choices[row])
        tokens.append(token)
        children = tree.children(row)
        child = next((c for c in children if tree.tokens[c] == token), None)
        if child is None:
            return Accepted(path, tokens, is_bonus=not children)
        row = child
        path.append(row)
