"""What a request may ask its drafter for: a fixed tree shape, or a budget that the drafter spends as it sees fit."""

from dataclasses import dataclass, replace
from functools import lru_cache

from treewy.errors import RequestError, TreeError
from treewy.tree import MAX_ROWS, DraftTree, topology

BEST = "best:"
# Trees that adapt are new at every step, and tables of recent trees are cached: this many rows keep those small.
MAX_BUDGET_ROWS = 256


@dataclass(frozen=True)
class Budget:
    """Limits of a tree whose shape is the drafter's choice: the most promising rows it can think of.

    Attributes:
        num_rows: Most rows, root included: as many as a fixed tree of this size has.
        max_depth: Depth of the deepest row; a drafter runs once per level.
        max_children: Most children of one row.

    Raises:
        RequestError: a limit is out of range.
    """

    num_rows: int = 16
    max_depth: int = 6
    max_children: int = 4

    def __post_init__(self) -> None:
        limits = (self.num_rows, self.max_depth, self.max_children)
        if any(isinstance(limit, bool) or not isinstance(limit, int) for limit in limits):
            raise RequestError(f"A budget's limits must be integers; got {limits!r:.80}. Use Budget(16, 6, 4), say.")
        if not 1 <= self.num_rows <= MAX_BUDGET_ROWS:
            raise RequestError(
                f"A budget must have 1 to {MAX_BUDGET_ROWS} rows, root included; got {self.num_rows}. Use a number between."
            )
        if self.max_depth < 0:
            raise RequestError(f"A budget's depth must be at least 0; got {self.max_depth}. Use 0 to draft nothing.")
        if self.max_children < 1:
            raise RequestError(
                f"A budget must allow at least 1 child per row; got {self.max_children}. Use 1 for chains."
            )


Shape = DraftTree | Budget


def parse_shape(*, tree: str | None = None, chain: int | None = None) -> Shape:
    """Return the shape that `--tree 3,3,3`, `--tree best:16` or `--chain 3` asks for; a chain of 3 when none is given.

    `best:ROWS`, `best:ROWSxDEPTH` and `best:ROWSxDEPTHxCHILDREN` are budgets; what is left out has `Budget`'s default.

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
    if tree.startswith(BEST):
        return _parse_budget(tree)
    try:
        return DraftTree.from_widths([int(width) for width in tree.split(",")])
    except (ValueError, TreeError) as error:
        raise RequestError(
            f"A tree must be positive widths per level, as in 3,3,3, and at most {MAX_ROWS} rows in all; got {tree!r}. "
            "Give one integer per level, or a budget of rows, as in best:16."
        ) from error


def _parse_budget(text: str) -> Budget:
    parts = text.removeprefix(BEST).split("x")
    if len(parts) > 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise RequestError(
            f"A budget must be rows, depth and children joined by x, the last two at will, as in best:16, best:16x5 or "
            f"best:16x5x3; got {text!r}. Give integers."
        )
    return Budget(*map(int, parts))


@lru_cache(maxsize=256)
def cut_to_depth(shape: Shape, depth: int) -> Shape:
    """Return the part of `shape` down to `depth`."""
    if shape.max_depth <= depth:
        return shape
    if isinstance(shape, Budget):
        return replace(shape, max_depth=depth)
    return shape.select([row for row, at in enumerate(shape.depth.tolist()) if at <= depth])


def in_level_order(shape: Shape) -> Shape:
    """Return a fixed shape with its rows sorted by depth; a budget has no order to mend."""
    return shape if isinstance(shape, Budget) else shape.breadth_first()


def most_children(shape: Shape) -> int:
    """Return how many children a row may get at most."""
    return shape.max_children if isinstance(shape, Budget) else max(map(len, topology(shape.parents).children))
