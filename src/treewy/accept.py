"""Acceptance rules: which drafts stand, and which token follows them. Pure; randomness is an argument.

The rules work on NumPy arrays of floats, or of `Fraction` objects: with a coin that takes every outcome in turn, the law
of what they emit is then exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from treewy.errors import ShapeError, TreeError
from treewy.shapes import Array, Float, Tensor
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
    """All the randomness a rule uses."""

    def flip(self, probability: float) -> bool:
        """Return True with this probability; always from 1 on."""
        ...

    def draw(self, weights: Array) -> int:
        """Return an index with a probability proportional to its weight."""
        ...


class Choice(NamedTuple):
    """What follows one row: a token, and the child that holds it, if one was accepted."""

    token: int
    child: int | None


def walk(tree: DraftTree, choose: Callable[[int], Choice]) -> Accepted:
    """Go down from the root, from child to accepted child, until a row's choice is none of them."""
    if tree.tokens is None:
        raise ShapeError("A draft must hold tokens to be accepted; got a bare shape. Use tree.with_tokens(ids).")
    path, tokens = [0], []
    while True:
        token, child = choose(path[-1])
        tokens.append(token)
        if child is None:
            return Accepted(path, tokens, is_bonus=not tree.children(path[-1]))
        path.append(child)


def walk_choices(tree: DraftTree, choices: Sequence[int]) -> Accepted:
    """Follow the target's choice at each row as long as a child holds it.

    Args:
        tree: The draft, with tokens.
        choices: The target's token after each row.
    """
    return walk(tree, lambda row: _held(tree, int(choices[row]), tree.children(row)))


def greedy(tree: DraftTree, logits: Float[Tensor, "T vocab"]) -> Accepted:
    """Accept the drafts that equal the target's most likely token; ties go to the lowest id, as argmax breaks them.

    The tokens are those of decoding without drafts, whatever the drafts were.
    """
    _check_rows(tree, logits.shape[0])
    return walk_choices(tree, logits.argmax(dim=-1).tolist())


def sampled(tree: DraftTree, target: Sequence[Array] | Array, laws: Mapping[int, Array], coin: Coin) -> Accepted:
    """Accept drafts so that the tokens follow the target's law exactly, whatever the drafts were.

    Args:
        tree: The draft, with tokens. Siblings in the order in which they were drawn.
        target: The target's law after each row, [T, vocab].
        laws: For each row whose children were drawn: the law that the first was drawn from; each further one is taken to
            be drawn from it without those before. Children of rows that are missing were chosen, not drawn: by any means
            that saw none of the coin's numbers.
        coin: Independent of what the drafts were drawn with.

    Source: eqs. 20-23 of docs/theory.md.
    """
    _check_rows(tree, len(target))
    return walk(tree, lambda row: choose_sampled(tree, row, target[row], laws.get(row), coin))


def choose_sampled(tree: DraftTree, row: int, target: Array, law: Array | None, coin: Coin) -> Choice:
    """Choose what follows one row, by recursive rejection among its drawn children, then by walking to a chosen one.

    A drawn child x, from law q, against what is left of the target's law, p, stands with probability min(1, p(x) / q(x)).
    If it falls, p becomes the normalised positive part of p - q, and q loses x. After the last drawn child a token is drawn
    from p, and a chosen child that holds it stands. Once q is used up, the children that follow count as chosen.

    With no law at all this is plain sampling, one draw per token, that happens to walk down the tree: with the same coin,
    the tokens are those of decoding without drafts.

    Source: eqs. 20-22 of docs/theory.md.
    """
    tokens, children = tree.tokens or (), tree.children(row)
    if law is None:
        return _held(tree, coin.draw(target), children)
    for place, child in enumerate(children):
        mass = law.sum()
        if not mass > 0:
            return _held(tree, coin.draw(target), children[place:])
        token = tokens[child]
        if not law[token] > 0:
            raise TreeError(
                f"A drawn child must hold a token its law could give; row {child} holds {token}, of probability "
                f"{law[token]} once its older siblings are drawn. Give no law for children that were chosen."
            )
        law = np.divide(law, mass)
        if coin.flip(target[token] / law[token]):
            return Choice(token, child)
        left = np.maximum(target - law, 0)
        # Nothing can be left only if rounding made a certain acceptance uncertain.
        if not (total := left.sum()) > 0:
            return Choice(token, child)
        target = left / total
        law[token] = 0
    return Choice(coin.draw(target), None)


def _held(tree: DraftTree, token: int, children: Sequence[int]) -> Choice:
    tokens = tree.tokens or ()
    return Choice(token, next((child for child in children if tokens[child] == token), None))


def _check_rows(tree: DraftTree, num_rows: int) -> None:
    if num_rows != tree.num_rows:
        raise ShapeError(
            f"logits must have one row per tree row, {tree.num_rows}; got {num_rows}. Pass the rows of this sequence only."
        )
