"""Trees grown without cleverness: every path's logits on their own, every row that the limits allow in one queue."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from treewy.draft import Budget
from treewy.sampling import Law
from treewy.tree import DraftTree

LogitsOf = Callable[[Sequence[int]], np.ndarray]


def ranked(logits: np.ndarray) -> list[int]:
    """Return all tokens, the likeliest first."""
    return np.argsort(-logits, kind="stable").tolist()


def log_law(logits: np.ndarray, law: Law | None) -> np.ndarray:
    """Return the log-probabilities: of temperature 1, or of a law that has a temperature and a top-k and no more."""
    scaled = logits / (law.temperature if law else 1.0)
    if law and law.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-law.top_k], scaled, -np.inf)
    return scaled - np.logaddexp.reduce(scaled)


def filled(logits_of: LogitsOf, root: int, shape: DraftTree) -> DraftTree:
    """Return `shape` with the likeliest tokens: each row's children from its root path."""
    tokens = [root] + [-1] * shape.num_drafts
    for row in range(shape.num_rows):
        best = ranked(logits_of([tokens[node] for node in shape.path(row)]))
        for rank, child in enumerate(shape.children(row)):
            tokens[child] = best[rank]
    return shape.with_tokens(tokens)


def best_first(logits_of: LogitsOf, root: int, budget: Budget, law: Law | None = None) -> DraftTree:
    """Return the tree that takes, one by one, the open row of largest path probability."""
    taken: list[tuple[int, ...]] = []
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {(root,): ()}
    queue = [(0.0, 0, (), (root,))]
    while queue and len(taken) < budget.num_rows:
        loss, depth, rank, path = heappop(queue)
        taken.append(path)
        if depth == budget.max_depth:
            continue
        logits = logits_of(path)
        for place, token in enumerate(ranked(logits)[: budget.max_children]):
            chance = log_law(logits, law)[token]
            if chance > -np.inf:
                ranks[*path, token] = (*rank, place)
                heappush(queue, (loss - chance, depth + 1, (*rank, place), (*path, token)))
    rows = sorted(taken, key=lambda path: (len(path), ranks[path]))
    return DraftTree([rows.index(path[:-1]) if path[1:] else -1 for path in rows], [path[-1] for path in rows])
