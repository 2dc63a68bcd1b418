"""Trees at named shapes, and the paths that are accepted on them."""

import re
from collections.abc import Sequence

import numpy as np

from treewy.bench.ops.cycle import SHARE_OF_FOUR
from treewy.errors import RequestError
from treewy.tree import DraftTree

TREES = ("tree15", "tree40", "spine64")
RAGGED = ("chain4", "tree15", "chain1", "tree40", "chain7", "spine64")


def trees_of(shape: str, num_seqs: int) -> list[DraftTree]:
    """Return one tree per sequence: all of one shape, or several shapes in turn for "ragged"."""
    names = RAGGED if shape == "ragged" else (shape,)
    return [tree_of(names[seq % len(names)]) for seq in range(num_seqs)]


def tree_of(shape: str) -> DraftTree:
    """Return the tree of `chainN` (N rows), tree15 (2,2,2), tree40 (3,3,3) or spine64 (16 rows with 3 leaves each).

    Raises:
        RequestError: no such shape.
    """
    if match := re.fullmatch(r"chain([1-9]\d*)", shape):
        return DraftTree.chain(int(match[1]) - 1)
    match shape:
        case "tree15":
            return DraftTree.from_widths([2, 2, 2])
        case "tree40":
            return DraftTree.from_widths([3, 3, 3])
        case "spine64":
            return spine(16, 3)
    raise RequestError(f"A shape must be chainN or one of {', '.join(TREES)}; got {shape!r}. Choose one of them.")


def spine(num_rows: int, num_leaves: int) -> DraftTree:
    """Return a chain of `num_rows` rows, each with `num_leaves` leaves below it beside the chain's next row."""
    parents, row = [-1], 0
    for level in range(num_rows):
        first = len(parents)
        parents += [row] * (num_leaves + (level < num_rows - 1))
        row = first
    return DraftTree(parents)


def paths_of(trees: Sequence[DraftTree], seed: int) -> list[list[int]]:
    """Return an accepted path per tree: 3 or 4 rows of a chain, 3.24 on average; 4 rows, to a leaf if it can, of a tree."""
    fours = np.random.default_rng(seed).random(len(trees)) < SHARE_OF_FOUR
    return [path_of(tree, 4 if four or not tree.is_chain else 3) for tree, four in zip(trees, fours, strict=True)]


def path_of(tree: DraftTree, num_rows: int) -> list[int]:
    """Return the path of `num_rows` rows, or as many as there are, to the last row of its level."""
    depth = min(num_rows - 1, tree.max_depth)
    return tree.path(int(np.flatnonzero(tree.depth == depth)[-1]))
