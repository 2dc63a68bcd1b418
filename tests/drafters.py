"""Drafters that know the answer, and give it or not, as they are told."""

from collections.abc import Sequence

import numpy as np

from treewy.draft import Committed, Draft, Drafter, Root
from treewy.tree import DraftTree


class ScriptedDrafter(Drafter):
    """Drafts from known continuations, right or wrong by a seeded coin.

    What it draws depends on the script and on how far it has come, never on slots or neighbours, so that a request
    meets the same drafts alone and in a batch. It checks what it is shown: every committed token, once and in order.

    Args:
        scripts: Whole sequences, prompt first, that decoding without drafts gives.
        right: Chance that a row of the true path has a child with the true next token.
        skip: Chance that a step drafts nothing.
        cut: Chance that a step drafts only a prefix of the shape.
        vocab_size: Drafts lie below.
        seed: Decides all coins.
    """

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        *,
        right: float = 0.75,
        skip: float = 0.0,
        cut: float = 0.0,
        vocab_size: int = 64,
        seed: int = 0,
    ) -> None:
        self.scripts = [list(script) for script in scripts]
        self.right, self.skip, self.cut, self.vocab_size, self.seed = right, skip, cut, vocab_size, seed
        self.known: dict[int, list[int]] = {}
        self.num_skipped = 0

    def allocate(self, slot: int) -> None:
        assert slot not in self.known, f"slot {slot} is started twice"
        self.known[slot] = []

    def free(self, slot: int) -> None:
        self.known.pop(slot, None)

    def observe(self, committed: Sequence[Committed]) -> None:
        for rows in committed:
            assert rows.hidden.shape[0] == len(rows.tokens)
            self.known[rows.slot] += rows.tokens

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        return [Draft(self._propose(root)) for root in roots]

    def _propose(self, root: Root) -> DraftTree:
        known = self.known[root.slot]
        assert known[-1] == root.token, "the root must be the newest token that was observed"
        number, script = self._script(known)
        rng = np.random.default_rng([self.seed, number, len(known)])
        shape = root.shape
        if rng.random() < self.skip:
            self.num_skipped += 1
            shape = shape.prefix(1)
        elif rng.random() < self.cut:
            shape = shape.prefix(int(rng.integers(1, shape.num_rows + 1)))
        return self._filled(shape, root.token, script[1 + len(known) :], rng)

    def _script(self, known: list[int]) -> tuple[int, list[int]]:
        """Return the script that what was observed follows; observed is everything but the prompt's first token."""
        for number, script in enumerate(self.scripts):
            if script[1 : 1 + len(known)] == known[: len(script) - 1]:
                return number, script
        raise AssertionError(f"observed tokens follow no script: {known}")

    def _filled(self, shape: DraftTree, root: int, future: list[int], rng: np.random.Generator) -> DraftTree:
        tokens = rng.integers(0, self.vocab_size, shape.num_rows).tolist()
        tokens[0], true_row = root, 0
        for depth, token in enumerate(future, start=1):
            # The right token under a wrong parent must not be taken for the right one.
            for row in np.flatnonzero(shape.depth == depth):
                if rng.random() < 0.3:
                    tokens[row] = token
            children = shape.children(true_row)
            if not children:
                break
            wrong = [t for t in rng.permutation(self.vocab_size).tolist() if t != token]
            for child, other in zip(children, wrong, strict=False):
                tokens[child] = other
            if rng.random() >= self.right:
                break
            true_row = children[int(rng.integers(len(children)))]
            tokens[true_row] = token
            if rng.random() < 0.1:  # twins: the first of them is the one to follow
                tokens[children[-1]] = token
                true_row = next(child for child in children if tokens[child] == token)
        return shape.with_tokens(tokens)


class Recorder(Drafter):
    """Passes everything on to another drafter; keeps what it was shown and the trees it proposed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.shown: list[Committed] = []
        self.trees: list[list[DraftTree]] = []

    def allocate(self, slot: int) -> None:
        self.inner.allocate(slot)

    def free(self, slot: int) -> None:
        self.inner.free(slot)

    def observe(self, committed: Sequence[Committed]) -> None:
        self.shown += committed
        self.inner.observe(committed)

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        drafts = self.inner.propose(roots)
        self.trees.append([draft.tree for draft in drafts])
        return drafts
