"""DraftTree: the shape of one draft, and the tables that follow from it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, SupportsIndex

import numpy as np

from treewy.errors import TreeError

WORD_BITS = 64
# Tables of a tree grow with the square of its rows: 16 MiB at this many.
MAX_ROWS = 4096


class Topology(NamedTuple):
    """Tables that depend on the parents alone; shared by every tree of the same shape."""

    depth: np.ndarray  # [T] int64, root 0
    ancestors: np.ndarray  # [T, T] bool; [t, i]: i is t or an ancestor of t
    words: np.ndarray  # [T, ceil(T / 64)] uint64: the same bits, bit i % 64 of word i // 64
    children: tuple[tuple[int, ...], ...]


class DraftTree:
    """A rooted tree of draft tokens in topological order.

    Row 0 is the root: the newest sampled token, which the committed state does not hold yet. A draft of n tokens
    therefore has n + 1 rows. Builders give breadth-first order, in which levels are contiguous; any order with every
    parent before its child is accepted.

    Args:
        parents: Parent row of each row; -1 for the root and only for it.
        tokens: Token id of each row, or None for a bare shape.

    Raises:
        TreeError: names the first bad row and why.
    """

    __slots__ = ("parents", "tokens")

    parents: tuple[int, ...]
    tokens: tuple[int, ...] | None

    def __init__(self, parents: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        self.parents = _checked_parents(parents)
        self.tokens = None if tokens is None else _checked_tokens(tokens, len(self.parents))

    @classmethod
    def chain(cls, num_drafts: int) -> DraftTree:
        """Return the chain of `num_drafts` drafts below the root."""
        if num_drafts < 0:
            raise TreeError(f"A chain must have at least 0 drafts; got {num_drafts}. Pass 0 for a step without drafts.")
        return cls.from_widths([1] * num_drafts)

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> DraftTree:
        """Return the breadth-first tree in which every row of level d has `widths[d]` children."""
        if not isinstance(widths, Iterable):
            raise TreeError(f"Widths of a tree must be a list, one per level; got {widths!r:.80}. Write [3, 3], say.")
        parents, level = [-1], [0]
        for depth, width in enumerate(widths):
            if not isinstance(width, (int, np.integer)) or isinstance(width, bool) or width < 1:
                raise TreeError(
                    f"Every level width must be a positive integer; level {depth + 1} has {width!r}. "
                    "Leave the level out to make the tree shallower."
                )
            start = len(parents)
            _check_size(start + len(level) * int(width))
            parents += [row for row in level for _ in range(width)]
            level = list(range(start, len(parents)))
        return cls(parents)

    def with_tokens(self, tokens: Sequence[int]) -> DraftTree:
        """Return this shape holding `tokens`, one id per row."""
        tree = object.__new__(DraftTree)
        tree.parents, tree.tokens = self.parents, _checked_tokens(tokens, len(self.parents))
        return tree

    @property
    def num_rows(self) -> int:
        """Rows, root included (T)."""
        return len(self.parents)

    @property
    def num_drafts(self) -> int:
        """Draft tokens: rows without the root."""
        return len(self.parents) - 1

    @property
    def depth(self) -> np.ndarray:
        """Depth of each row, root 0: [T] int64. Position of a row = committed length + depth."""
        return topology(self.parents).depth

    @property
    def max_depth(self) -> int:
        """Depth of the deepest row (D)."""
        return int(self.depth.max())

    @property
    def ancestors(self) -> np.ndarray:
        """[T, T] bool; entry [t, i] says that row i is row t or one of its ancestors."""
        return topology(self.parents).ancestors

    @property
    def ancestor_words(self) -> np.ndarray:
        """`ancestors` as little-endian bits: [T, ceil(T / 64)] uint64."""
        return topology(self.parents).words

    @property
    def is_chain(self) -> bool:
        """Whether every row's parent is the row before it."""
        return self.parents == tuple(range(-1, self.num_rows - 1))

    def children(self, row: int) -> tuple[int, ...]:
        """Return the rows whose parent is `row`, in row order."""
        return topology(self.parents).children[row]

    def path(self, row: int) -> list[int]:
        """Return the rows from the root to `row`, both included."""
        if not 0 <= row < self.num_rows:
            raise TreeError(f"A path must end at a row of the tree; got row {row} of {self.num_rows} rows.")
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        return rows[::-1]

    def breadth_first(self) -> DraftTree:
        """Return the same tree with its rows sorted by depth, ties in the old order."""
        return self.select(np.argsort(self.depth, kind="stable").tolist())

    def select(self, rows: Sequence[int]) -> DraftTree:
        """Return the tree of `rows`, renumbered in the order given.

        Raises:
            TreeError: a row is not in the tree or comes twice, or its parent is missing or comes after it.
        """
        new_row = {-1: -1}
        for place, row in enumerate(rows):
            if not 0 <= row < self.num_rows or row in new_row:
                raise TreeError(
                    f"A selection must hold rows of the tree, each once; place {place} has row {row} of "
                    f"{self.num_rows} rows. Select distinct rows in 0..{self.num_rows - 1}."
                )
            if self.parents[row] not in new_row:
                raise TreeError(
                    f"A selection must hold every row's parent before the row; row {row} has parent "
                    f"{self.parents[row]}, which is not before it. Select whole root paths."
                )
            new_row[row] = place
        parents = [new_row[self.parents[row]] for row in rows]
        return DraftTree(parents, None if self.tokens is None else [self.tokens[row] for row in rows])

    def prefix(self, num_rows: int) -> DraftTree:
        """Return the tree of the first `num_rows` rows, which in topological order is always a tree."""
        if not 1 <= num_rows <= self.num_rows:
            raise TreeError(f"A prefix must have 1..{self.num_rows} rows; got {num_rows}. Cut the budget to the tree.")
        return self.select(range(num_rows))

    def best_subtree(self, scores: Sequence[float], budget: int) -> list[int]:
        """Return the rows of the best ancestor-closed subtree of at most `budget` rows.

        The subtree has the largest sum of scores, exactly, for any scores; the root always stays. Feed the rows to
        `select`. Runs in O(T * budget).

        Args:
            scores: One number per row, for example the path's probability under the drafter.
            budget: Most rows to keep, root included.
        """
        if len(scores) != self.num_rows:
            raise TreeError(f"There must be one score per row; got {len(scores)} scores for {self.num_rows} rows.")
        if np.isnan(scores).any():
            raise TreeError(f"Every score must be a number; got {list(scores)}. Give rows without a score -inf.")
        if budget < 1:
            raise TreeError(f"A row budget must be at least 1, for the root; got {budget}.")
        return _tree_knapsack(self, np.asarray(scores, dtype=np.float64), min(budget, self.num_rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and (self.parents, self.tokens) == (other.parents, other.tokens)

    def __hash__(self) -> int:
        return hash((self.parents, self.tokens))

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f", tokens={list(self.tokens)}"
        return f"DraftTree(parents={list(self.parents)}{tokens})"


@lru_cache(maxsize=256)
def topology(parents: tuple[int, ...]) -> Topology:
    """Return the tables of a checked tree; cached, so that equal shapes share them."""
    num_rows = len(parents)
    depth = np.zeros(num_rows, dtype=np.int64)
    ancestors = np.eye(num_rows, dtype=bool)
    children: list[list[int]] = [[] for _ in parents]
    for row in range(1, num_rows):
        parent = parents[row]
        depth[row] = depth[parent] + 1
        ancestors[row] |= ancestors[parent]
        children[parent].append(row)
    for table in (depth, ancestors):
        table.setflags(write=False)
    return Topology(depth, ancestors, _bit_words(ancestors), tuple(map(tuple, children)))


def _bit_words(ancestors: np.ndarray) -> np.ndarray:
    num_rows = ancestors.shape[0]
    padded = np.zeros((num_rows, -(-num_rows // WORD_BITS) * WORD_BITS), dtype=bool)
    padded[:, :num_rows] = ancestors
    words = np.packbits(padded, axis=1, bitorder="little").view("<u8")
    words.setflags(write=False)
    return words


def _check_size(num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise TreeError(f"A tree may have at most {MAX_ROWS} rows; got {num_rows} or more. Draft fewer tokens.")


def _checked_parents(parents: Sequence[int]) -> tuple[int, ...]:
    _check_size(len(parents))
    checked = tuple(_as_int(parent, row) for row, parent in enumerate(parents))
    if not checked:
        raise TreeError("A tree must have at least its root; got no rows. Pass parents=[-1] for a step without drafts.")
    if checked[0] != -1:
        raise TreeError(f"Row 0 must be the root, with parent -1; it has parent {checked[0]}. Put the root first.")
    for row, parent in enumerate(checked[1:], start=1):
        if parent < 0:
            raise TreeError(
                f"There must be one root, row 0; node {row} has parent {parent}. "
                f"Give node {row} a parent in 0..{row - 1}."
            )
        if parent >= row:
            raise TreeError(
                f"Every parent must precede its child; node {row} has parent {parent}. "
                "Sort the nodes in topological order first."
            )
    return checked


def _as_int(parent: object, row: int) -> int:
    if isinstance(parent, (bool, np.bool_)) or not isinstance(parent, (int, np.integer)):
        raise TreeError(f"Every parent must be an integer; node {row} has parent {parent!r}. Pass row numbers.")
    return int(parent)


def _checked_tokens(tokens: Sequence[int], num_rows: int) -> tuple[int, ...]:
    checked = tuple(_as_token(token, row) for row, token in enumerate(tokens))
    if len(checked) != num_rows:
        raise TreeError(f"There must be one token per row; got {len(checked)} tokens for {num_rows} rows.")
    for row, token in enumerate(checked):
        if token < 0:
            raise TreeError(f"Every token id must be at least 0; node {row} has token {token}. Drop the node instead.")
    return checked


def _as_token(token: object, row: int) -> int:
    if isinstance(token, SupportsIndex) and not isinstance(token, (bool, np.bool_)):
        return operator.index(token)
    raise TreeError(f"Every token id must be an integer; node {row} has token {token!r}. Pass token ids.")


def _tree_knapsack(tree: DraftTree, scores: np.ndarray, budget: int) -> list[int]:
    """Solve the tree knapsack in depth-first order: take a row and go on, or skip its whole subtree."""
    order, after = _depth_first(tree)
    num_rows = tree.num_rows
    best = np.zeros((num_rows + 1, budget + 1))
    take = np.zeros((num_rows, budget + 1), dtype=bool)
    for place in range(num_rows - 1, -1, -1):
        with_row = scores[order[place]] + best[place + 1, :-1]
        skip = best[after[place]]
        take[place, 1:] = with_row > skip[1:]
        best[place] = skip
        best[place, 1:] = np.where(take[place, 1:], with_row, skip[1:])
    # The root is never up for a choice: it is the token the step must verify.
    kept, place, left = [order[0]], 1, budget - 1
    while place < num_rows:
        if take[place, left]:
            kept.append(order[place])
            place, left = place + 1, left - 1
        else:
            place = after[place]
    return sorted(kept)


def _depth_first(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return the rows in depth-first order, and for each place the place after its subtree."""
    order: list[int] = []
    stack = [0]
    while stack:
        row = stack.pop()
        order.append(row)
        stack.extend(reversed(tree.children(row)))
    size = tree.ancestors.sum(axis=0)
    return order, [place + int(size[row]) for place, row in enumerate(order)]
