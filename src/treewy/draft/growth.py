"""Trees grown level by level from a drafter's logits: fixed shapes filled, budgets spent best first."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from treewy.draft.base import Draft, Root
from treewy.draft.children import drawn, log_chances, most_likely
from treewy.draft.shape import Budget
from treewy.shapes import Float, Int, Tensor
from treewy.tree import DraftTree


class Growth(ABC):
    """One sequence's tree while it grows.

    Attributes:
        parents, tokens: The rows that the drafter must run: those whose children are wanted, in level order. A tree of
            their own, to which each level appends.
        num_new: Rows of the newest level, which wait for their children; 0 once the tree is grown.
    """

    parents: list[int]
    tokens: list[int]
    num_new: int

    def __init__(self, token: int, *, is_alone: bool) -> None:
        self.parents, self.tokens, self.num_new = [-1], [token], 0 if is_alone else 1

    @property
    def tree(self) -> DraftTree:
        """The rows to run."""
        return DraftTree(self.parents, self.tokens)

    @property
    @abstractmethod
    def num_children(self) -> int:
        """Most children that a new row may get."""

    @abstractmethod
    def extend(self, logits: Float[Tensor, "R vocab"], ranked: Int[Tensor, "R X"]) -> None:
        """Give the new rows their children, and run those that may have children in turn.

        Args:
            logits: The drafter's, after the new rows.
            ranked: The most likely tokens after each, best first: at least `num_children`.
        """

    @abstractmethod
    def draft(self) -> Draft:
        """Return the tree that has grown."""

    def _run(self, rows: Sequence[tuple[int, int]]) -> None:
        """Append a level of (parent, token)."""
        self.parents += [parent for parent, _ in rows]
        self.tokens += [token for _, token in rows]
        self.num_new = len(rows)


class ShapeGrowth(Growth):
    """A fixed shape: each row's children are the most likely tokens after it, or drawn ones."""

    def __init__(self, root: Root, shape: DraftTree) -> None:
        super().__init__(root.token, is_alone=not shape.num_drafts)
        self._shape, self._draws = shape, root.draws
        self._filled = [root.token] + [0] * shape.num_drafts
        self._laws: dict[int, Tensor] = {}
        self._newest = [0]  # rows of the shape

    @property
    def num_children(self) -> int:
        """See `Growth.num_children`."""
        return max(len(self._shape.children(row)) for row in self._newest)

    def extend(self, logits: Float[Tensor, "R vocab"], ranked: Int[Tensor, "R X"]) -> None:
        """See `Growth.extend`."""
        if self._draws is not None:
            ranked, law = drawn(logits, self.num_children, self._draws)
            self._laws.update(zip(self._newest, law, strict=True))
        first, below, rows = len(self.parents) - self.num_new, [], []
        for parent, (row, tokens) in enumerate(zip(self._newest, ranked.tolist(), strict=True), start=first):
            for child, token in zip(self._shape.children(row), tokens, strict=False):
                self._filled[child] = token
                if self._shape.children(child):
                    below.append(child)
                    rows.append((parent, token))
        self._newest = below
        self._run(rows)

    def draft(self) -> Draft:
        """See `Growth.draft`."""
        return Draft(self._shape.with_tokens(self._filled), self._laws)


class _Candidate(NamedTuple):
    """A row that may stay: its promise is the log-probability of its whole path, the sum of the log-chances on it."""

    promise: float
    parent: int  # a candidate
    token: int
    depth: int
    run: int  # its row among those that ran; -1 while it has not


class BestGrowth(Growth):
    """A budget spent best first: the rows of largest path probability under the drafter, whatever tree they make.

    A path's probability is the product of its tokens', so no row has more than its parent: the best rows are a tree, and
    a row that the budget cannot hold any more has no descendant that it could. So only rows that are still in are run.

    The children are chosen, not drawn: their number and place depend on the drafter's logits and on nothing random. So
    there are no laws, and acceptance walks. Rows equally promising stay in order: upper levels first, then older parents,
    then better siblings. Tokens without any probability are not drafted.

    Source: the dynamic trees of EAGLE-2, arXiv 2406.16858, with every row that can stay expanded.
    """

    def __init__(self, root: Root, budget: Budget) -> None:
        super().__init__(root.token, is_alone=budget.num_rows == 1 or budget.max_depth == 0)
        self._budget, self._law = budget, root.draws and root.draws.law
        self._candidates = [_Candidate(0.0, -1, root.token, 0, run=0)]
        self._kept = [0]
        self._newest = [0]  # candidates

    @property
    def num_children(self) -> int:
        """See `Growth.num_children`."""
        # A row's n-th child is preceded by the root and n - 1 siblings: later ones never fit.
        return min(self._budget.max_children, self._budget.num_rows - 1)

    def extend(self, logits: Float[Tensor, "R vocab"], ranked: Int[Tensor, "R X"]) -> None:
        """See `Growth.extend`."""
        ranked = ranked[:, : self.num_children]
        chances = log_chances(logits, ranked, self._law).tolist()
        for parent, tokens, of_tokens in zip(self._newest, ranked.tolist(), chances, strict=True):
            above = self._candidates[parent]
            for token, chance in zip(tokens, of_tokens, strict=True):
                # Neither a chance of nothing nor one that is not a number promises anything.
                if chance > -float("inf"):
                    self._candidates.append(_Candidate(above.promise + chance, parent, token, above.depth + 1, run=-1))
        by_promise = sorted(range(len(self._candidates)), key=lambda i: (-self._candidates[i].promise, i))
        self._kept = sorted(by_promise[: self._budget.num_rows])
        self._run_newest()

    def _run_newest(self) -> None:
        depth = self._candidates[self._newest[0]].depth + 1
        deeper = depth < self._budget.max_depth
        self._newest = [i for i in self._kept if deeper and self._candidates[i].depth == depth]
        for row, i in enumerate(self._newest, start=len(self.parents)):
            self._candidates[i] = self._candidates[i]._replace(run=row)
        newest = [self._candidates[i] for i in self._newest]
        self._run([(self._candidates[x.parent].run, x.token) for x in newest])

    def draft(self) -> Draft:
        """See `Growth.draft`."""
        kept = [self._candidates[i] for i in self._kept]
        row_of = {-1: -1} | {i: row for row, i in enumerate(self._kept)}
        return Draft(DraftTree([row_of[x.parent] for x in kept], [x.token for x in kept]))


def grow(roots: Sequence[Root], logits: Callable[[list[tuple[int, Growth]]], Float[Tensor, "R vocab"]]) -> list[Draft]:
    """Grow one tree per root, all sequences level by level together.

    Args:
        roots: What is asked for.
        logits: Runs the new rows of the growths given, each with its sequence's place among `roots`; returns the drafter's
            logits after those rows, end to end. Called once per level, with those that still grow.
    """
    growths = [_start(root) for root in roots]
    while growing := [(seq, growth) for seq, growth in enumerate(growths) if growth.num_new]:
        after = logits(growing)
        ranked = most_likely(after, max(growth.num_children for _, growth in growing))
        first = 0
        for _, growth in growing:
            new = slice(first, first + growth.num_new)
            first = new.stop
            growth.extend(after[new], ranked[new])
    return [growth.draft() for growth in growths]


def _start(root: Root) -> Growth:
    return BestGrowth(root, root.shape) if isinstance(root.shape, Budget) else ShapeGrowth(root, root.shape)
