"""The exact law of what a step delivers: every coin taken both ways, in fractions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import perm
from typing import NamedTuple, TypeVar

import numpy as np

from treewy.accept import Accepted
from treewy.tree import DraftTree

Tokens = tuple[int, ...]
Rule = Callable[..., Accepted]
Result = TypeVar("Result")

ROOT = 0


class Branching:
    """A coin that does as its script says and then takes the first outcome, noting what else could have been."""

    def __init__(self, script: list[int]) -> None:
        self.taken, self.counts, self.weight = script, [], Fraction(1)

    def flip(self, probability: Fraction) -> bool:
        stands = min(Fraction(probability), Fraction(1))
        return self._take([(True, stands), (False, 1 - stands)])

    def draw(self, weights: np.ndarray) -> int:
        total = weights.sum()
        return self._take([(index, Fraction(weight) / total) for index, weight in enumerate(weights)])

    def _take(self, options: list[tuple]) -> int | bool:
        possible = [option for option in options if option[1]]
        if len(self.counts) == len(self.taken):
            self.taken = [*self.taken, 0]
        outcome, chance = possible[self.taken[len(self.counts)]]
        self.counts.append(len(possible))
        self.weight *= chance
        return outcome


def outcomes(run: Callable[[Branching], Result]) -> Iterator[tuple[Fraction, Result]]:
    """Yield every result that `run` can have, with its chance, one per way to get there."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        coin = Branching(script)
        result = run(coin)
        for place in range(len(script), len(coin.counts)):
            scripts += [[*coin.taken[:place], other] for other in range(1, coin.counts[place])]
        yield coin.weight, result


class Laws:
    """Rational laws after every text, made up as they are asked for: with zeros, points, and ties.

    Args:
        rng: Makes them up.
        vocab: Number of tokens.
        like: Laws that a third of these are equal to.
    """

    def __init__(self, rng: np.random.Generator, vocab: int, like: "Laws | None" = None) -> None:
        self._rng, self.vocab, self._like = rng, vocab, like
        self._known: dict[Tokens, np.ndarray] = {}

    def __call__(self, text: Tokens) -> np.ndarray:
        if text not in self._known:
            copies = self._like is not None and self._rng.random() < 1 / 3
            self._known[text] = self._like(text) if copies else self._made_up()
        return self._known[text]

    def _made_up(self) -> np.ndarray:
        weights = self._rng.integers(0, 6, self.vocab)
        if self._rng.random() < 0.1 or not weights.any():
            weights = np.eye(self.vocab, dtype=int)[self._rng.integers(self.vocab)]
        return fractions(weights) / int(weights.sum())


def fractions(numbers: Sequence[int | str | Fraction] | np.ndarray) -> np.ndarray:
    """Return an array of fractions."""
    return np.array([Fraction(str(number)) for number in numbers], dtype=object)


class Case(NamedTuple):
    """One step to be enumerated.

    Attributes:
        shape: Of the draft.
        drawn: Rows whose children are drawn; those of the others are chosen.
        target, drafter: Laws after a text, the root's token first.
        chosen: Tokens of a row's children, by that row and everything drafted before.
    """

    shape: DraftTree
    drawn: frozenset[int]
    target: Laws
    drafter: Laws
    chosen: Callable[[int, Tokens], Sequence[int]]

    @property
    def branches(self) -> bool:
        """Whether some row has several drawn children."""
        return any(len(self.shape.children(row)) > 1 for row in self.drawn)


def random_case(rng: np.random.Generator, *, drawn: float, chain: bool = False, max_drafts: int = 60) -> Case:
    """Return a case with at most `max_drafts` different drafts; `drawn` is the share of rows whose children are drawn."""
    vocab = int(rng.choice([2, 3, 4, 5], p=[0.2, 0.4, 0.3, 0.1]))
    target = Laws(rng, vocab)
    shape = DraftTree.chain(int(rng.integers(1, 4))) if chain else random_shape(rng, vocab)
    rows, num_drafts = set(), 1
    for row in range(shape.num_rows):
        grown = num_drafts * perm(vocab, len(shape.children(row)))
        if shape.children(row) and rng.random() < drawn and grown <= max_drafts:
            rows.add(row)
            num_drafts = grown
    picks: dict[tuple[int, Tokens], list[int]] = {}

    def chosen(row: int, before: Tokens) -> list[int]:
        # Twins among them: a chosen token may come twice.
        twins = rng.random() < 0.2
        return picks.setdefault(
            (row, before), rng.choice(vocab, len(shape.children(row)), replace=bool(twins)).tolist()
        )

    return Case(shape, frozenset(rows), target, Laws(rng, vocab, like=target), chosen)


def random_shape(rng: np.random.Generator, vocab: int) -> DraftTree:
    """Return a tree of 2 to 7 rows, at most 3 deep, uneven, no row with more children than there are tokens."""
    depth, width, parents = [0], [0], [-1]
    # Long walks over five tokens are many.
    deepest = 3 if vocab < 4 else 2
    for _ in range(int(rng.integers(1, 7))):
        open_rows = [row for row in range(len(parents)) if depth[row] < deepest and width[row] < vocab]
        if not open_rows:
            break
        # Low rows first, or hardly any tree would branch where it is always walked.
        parent = open_rows[int(len(open_rows) * rng.random() ** 2)]
        parents.append(parent)
        width[parent] += 1
        depth.append(depth[parent] + 1)
        width.append(0)
    return DraftTree(parents)


class Drafted(NamedTuple):
    """A draft, and the law behind each row's drawn children."""

    tree: DraftTree
    laws: Mapping[int, np.ndarray]


def draft(case: Case, coin: Branching, text: Tokens = (ROOT,)) -> Drafted:
    """Draw a draft after `text`, as drafters do: siblings one after the other, each from what is left."""
    shape, laws = case.shape, {}
    tokens = [text[-1]] + [0] * shape.num_drafts
    for row in range(shape.num_rows):
        children = shape.children(row)
        if not children:
            continue
        if row in case.drawn:
            laws[row] = case.drafter(after(text, tokens, shape, row))
            drawn = draw_siblings(coin, laws[row], len(children))
        else:
            drawn = case.chosen(row, tuple(tokens))
        for child, token in zip(children, drawn, strict=True):
            tokens[child] = token
    return Drafted(shape.with_tokens(tokens), laws)


def draw_siblings(coin: Branching, law: np.ndarray, num: int) -> list[int]:
    """Draw without replacement; once the law is used up, take the lowest ids that are left."""
    taken: list[int] = []
    for _ in range(num):
        left = law.copy()
        left[taken] = 0
        spare = next(token for token in range(len(law)) if token not in taken)
        taken.append(coin.draw(left) if left.sum() > 0 else spare)
    return taken


def after(text: Tokens, tokens: Sequence[int], shape: DraftTree, row: int) -> Tokens:
    """Return the text that ends in `row`."""
    return (*text, *(tokens[node] for node in shape.path(row)[1:]))


def target_rows(case: Case, tree: DraftTree, text: Tokens = (ROOT,)) -> list[np.ndarray]:
    """Return the target's law after each row."""
    return [case.target(after(text, tree.tokens, tree, row)) for row in range(tree.num_rows)]


def law_of(run: Callable[[Branching], Tokens]) -> dict[Tokens, Fraction]:
    """Return the law of what `run` delivers."""
    law: dict[Tokens, Fraction] = {}
    for chance, tokens in outcomes(run):
        law[tokens] = law.get(tokens, Fraction(0)) + chance
    return law


def is_lossless(delivered: Mapping[Tokens, Fraction], target: Laws, length: int) -> bool:
    """Whether what was delivered, with plain sampling after it, has the target's own law over `length` tokens."""
    want, ended = {(): Fraction(1)}, {(): delivered.get((), Fraction(0))}
    for _ in range(length):
        longer: tuple[dict[Tokens, Fraction], dict[Tokens, Fraction]] = ({}, {})
        for text in want.keys() | ended.keys():
            for token, chance in enumerate(target((ROOT, *text))):
                grown = (*text, token)
                sums = want.get(text, 0) * chance, ended.get(text, 0) * chance + delivered.get(grown, 0)
                for sum_, place in zip(sums, longer, strict=True):
                    if sum_:
                        place[grown] = sum_
        want, ended = longer
    assert max(map(len, delivered)) <= length
    return want == ended
