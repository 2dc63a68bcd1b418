"""From a drafting budget to a tree shape."""

from functools import lru_cache

from treewy.errors import RequestError, TreeError
from treewy.tree import MAX_ROWS, DraftTree


def parse_shape(*, tree: str | None = None, chain: int | None = None) -> DraftTree:
    """Return the shape that `--tree 3,3,3` or `--chain 3` asks for; a chain of 3 when neither is given.

    Raises:
        RequestError: both are given, or one cannot be read.
    """
    if tree is not None and chain is not None:
        raise RequestError(f"Only one of tree and chain can be given; got tree {tree!r} and chain {chain}. Drop one.")
    if tree is None:
        drafts = 3 if chain is None else chain
        if not 0 <= drafts < MAX_ROWS:
            raise RequestError(
                f"A chain must have 0 to {MAX_ROWS - 1} drafts; got {drafts}. Use 0 to decode without drafts."
            )
        return DraftTree.chain(drafts)
    try:
        return DraftTree.from_widths([int(width) for width in tree.split(",")])
    except (ValueError, TreeError) as error:
        raise RequestError(
            f"A tree must be positive widths per level, as in 3,3,3, and at most {MAX_ROWS} rows in all; got {tree!r}. "
            "Give one integer per level."
        ) from error


@lru_cache(maxsize=256)
def cut_to_depth(shape: DraftTree, depth: int) -> DraftTree:
    """Return the rows of `shape` down to `depth`."""
    if shape.max_depth <= depth:
        return shape
    return shape.select([row for row, at in enumerate(shape.depth.tolist()) if at <= depth])
