"""Trees from a sequence's own past: what followed the last tokens when they stood there before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from treewy.draft.base import Committed, Draft, Drafter, Root
from treewy.draft.shape import most_children
from treewy.errors import RequestError
from treewy.tree import DraftTree


class NgramDrafter(Drafter):
    """Looks up the newest tokens in the sequence's own prompt and output, and drafts what followed them.

    Earlier places that end in the same `max_n` tokens are looked for first, then shorter ends down to `min_n`; of each
    length the newest first, `max_matches` in all. Their continuations are merged: a beginning that several share is one
    row. Rows are worth as much as the longest match behind them, then as their count of matches, then as their newest
    match; siblings stand in that order, and the best rows that the shape has room for are drafted. A chain is thus the
    best token after each token. Nothing is ever drafted that the sequence does not hold, and no model runs.

    The children are chosen, not drawn.

    Args:
        max_n: Most tokens to look up.
        min_n: Fewest.
        max_matches: Most earlier places to read.

    Raises:
        RequestError: the lengths are out of order, or no match may be read.
    """

    def __init__(self, *, max_n: int = 4, min_n: int = 1, max_matches: int = 32) -> None:
        if not 1 <= min_n <= max_n:
            raise RequestError(
                f"Lookup lengths must satisfy 1 <= min_n <= max_n; got min_n {min_n} and max_n {max_n}. Swap or raise them."
            )
        if max_matches < 1:
            raise RequestError(f"Lookup must read at least 1 match; got max_matches {max_matches}. Use draft 'none'.")
        self.max_n, self.min_n, self.max_matches = max_n, min_n, max_matches
        self._texts: dict[int, _Text] = {}

    def allocate(self, slot: int) -> None:
        """See `Drafter.allocate`."""
        self._texts[slot] = _Text(range(self.min_n, self.max_n + 1))

    def free(self, slot: int) -> None:
        """See `Drafter.free`."""
        self._texts.pop(slot, None)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Append what was committed to each text, and index it."""
        for rows in committed:
            text = self._texts[rows.slot]
            for token in rows.tokens if text.tokens else (rows.first, *rows.tokens):
                text.append(token)

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [Draft(self._tree(root)) for root in roots]

    def _tree(self, root: Root) -> DraftTree:
        text, trie = self._texts[root.slot], _Node()
        for place, (start, length) in enumerate(text.matches()):
            if place == self.max_matches:
                break
            trie.add(text.tokens[start : start + root.shape.max_depth], start, length)
        return trie.best(root.token, root.shape.num_rows, most_children(root.shape))


@dataclass
class _Text:
    """A sequence's tokens, and where each of its n-grams ends."""

    lengths: range
    tokens: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def append(self, token: int) -> None:
        """Take in one token and the n-grams that end with it."""
        self.tokens.append(token)
        end = len(self.tokens)
        for n in self.lengths:
            if n <= end:
                self._ends.setdefault(tuple(self.tokens[end - n :]), []).append(end)

    def matches(self) -> Iterator[tuple[int, int]]:
        """Yield earlier ends of the newest tokens with their match's length: long ones first, then new ones; each once."""
        end = len(self.tokens)
        found = {end}  # the newest tokens themselves
        for n in reversed(self.lengths):
            # Shorter texts than n have no such n-gram, and shorter slices than n none of this length.
            for start in reversed(self._ends.get(tuple(self.tokens[max(0, end - n) :]), [])):
                if start not in found:
                    found.add(start)
                    yield start, n


@dataclass
class _Node:
    """A token of merged continuations. No node is worth more than its parent, so the best ones are a tree."""

    length: int = 0
    count: int = 0
    newest: int = -1
    children: dict[int, "_Node"] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], start: int, length: int) -> None:
        """Merge in a continuation of a match."""
        node = self
        for token in tokens:
            node = node.children.setdefault(token, _Node())
            node.length, node.count, node.newest = max(node.length, length), node.count + 1, max(node.newest, start)

    def best(self, root: int, num_rows: int, max_children: int) -> DraftTree:
        """Return the best rows below `root`, in level order."""
        parents, tokens, heap = [], [], []

        def take(parent: int, token: int, depth: int, node: _Node) -> None:
            row = len(parents)
            parents.append(parent)
            tokens.append(token)
            ranked = sorted(node.children.items(), key=lambda item: item[1]._rank())
            for child_token, child in ranked[:max_children]:
                # Open nodes have no match in common, so their newest ones differ and nodes themselves never compare.
                heappush(heap, (*child._rank(), depth + 1, row, child_token, child))

        take(-1, root, 0, self)
        while heap and len(parents) < num_rows:
            *_, depth, parent, token, node = heappop(heap)
            take(parent, token, depth, node)
        return DraftTree(parents, tokens).breadth_first()

    def _rank(self) -> tuple[int, int, int]:
        return -self.length, -self.count, -self.newest
