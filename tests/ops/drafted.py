"""Random batches of drafts with what acceptance needs: logits, laws of both models, numbers. A function of the seed."""

from typing import NamedTuple

import numpy as np
import torch

from treewy.ops import accept
from treewy.packed import PackedTree, pack
from treewy.sampling import Law
from treewy.tree import DraftTree


class Drafted(NamedTuple):
    """The operands of acceptance."""

    tree: PackedTree
    tokens: torch.Tensor
    logits: torch.Tensor
    laws: accept.RequestLaws
    uniforms: torch.Tensor
    drawn: accept.DrawnLaws
    slots: torch.Tensor

    def on(self, device: str) -> "Drafted":
        """Return the same on a device."""
        tree = pack(list(map(DraftTree, self.tree.shapes)), num_rows=self.tree.num_rows, device=device)
        laws, drawn = ((type(x)(*(y.to(device) for y in x))) for x in (self.laws, self.drawn))
        rest = (x.to(device) for x in (self.tokens, self.logits, self.uniforms, self.slots))
        tokens, logits, uniforms, slots = rest
        return Drafted(tree, tokens, logits, laws, uniforms, drawn, slots)

    def sampled(self, *, drawn: bool = True, **options) -> accept.AcceptedTables:
        """Run `accept.sampled` on the batch."""
        options = {"slots": self.slots, "drawn": self.drawn if drawn else None} | options
        return accept.sampled(self.tree.tables, self.tokens, self.logits, self.laws, self.uniforms, **options)

    def greedy(self, **options) -> accept.AcceptedTables:
        """Run `accept.greedy` on the batch."""
        return accept.greedy(self.tree.tables, self.tokens, self.logits, **{"slots": self.slots} | options)


def make(
    seed: int,
    *,
    num_seqs: int,
    vocab: int,
    max_rows: int = 12,
    max_support: int | None = None,
    share_drawn: float = 0.7,
    num_levels: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drafted:
    """Return a random batch: ragged trees, slots with -1 among them, every mix of laws, children drawn and chosen.

    Args:
        seed: Decides everything.
        num_seqs: Sequences.
        vocab: Tokens.
        max_rows: Rows of the largest tree.
        max_support: Most tokens that a drafter's law gives something; fewer than children use it up.
        share_drawn: Share of rows whose children are drawn.
        num_levels: Different logits, so that there are ties; None: as many as there are.
        dtype: Of the logits.
    """
    rng = np.random.default_rng(seed)
    trees = [_tree(rng, int(rng.integers(1, max_rows + 1))) for _ in range(num_seqs)]
    tree = pack(trees, num_rows=sum(x.num_rows for x in trees) + int(rng.integers(0, 3)))
    logits = rng.normal(size=(tree.num_rows, vocab)) * 2
    if num_levels is not None:
        logits = rng.integers(0, num_levels, logits.shape) * 1.5 - 2
    # Drafts that the target likes: most walks would end at once.
    tokens = rng.integers(0, vocab, tree.num_rows)
    law_of_row, laws = np.full(tree.num_rows, -1), [np.zeros(vocab)]
    for start, shape in zip(tree.starts, trees, strict=False):
        for row in range(shape.num_rows):
            children = [start + child for child in shape.children(row)]
            if children and rng.random() < share_drawn:
                law_of_row[start + row] = len(laws)
                laws.append(_law(rng, logits[start + row], max_support))
                tokens[children] = siblings(rng, laws[-1], len(children))
            elif children:
                tokens[children] = np.argsort(-logits[start + row], kind="stable")[: len(children)][
                    np.arange(len(children)) % vocab
                ]
    requests = [_request(rng) for _ in range(num_seqs)]
    return Drafted(
        tree,
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logits, dtype=dtype),
        accept.request_laws(requests),
        torch.tensor(rng.random((num_seqs, max(tree.max_size, 1)))),
        accept.DrawnLaws(torch.tensor(np.array(laws)), torch.tensor(law_of_row, dtype=torch.int32)),
        torch.tensor(rng.choice([0, 1, 2, 3, -1], num_seqs)),
    )


def _tree(rng: np.random.Generator, num_rows: int) -> DraftTree:
    reach = int(rng.choice([1, 2, 4, num_rows]))
    return DraftTree([-1] + [int(rng.integers(max(0, row - reach), row)) for row in range(1, num_rows)])


def _request(rng: np.random.Generator) -> Law | None:
    if rng.random() < 0.15:
        return None
    return Law(
        temperature=float(rng.choice([0.3, 1.0, 2.0])),
        top_k=int(rng.choice([0, 1, 3, 20, 10**6])),
        top_p=float(rng.choice([1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0.0, 0.1])),
    )


def _law(rng: np.random.Generator, logits: np.ndarray, max_support: int | None) -> np.ndarray:
    weights = np.exp(logits + rng.normal(size=logits.shape))
    support = len(logits) if max_support is None else int(rng.integers(1, max_support + 1))
    weights[np.argsort(weights)[: len(logits) - support]] = 0
    return weights / weights.sum()


def siblings(rng: np.random.Generator, law: np.ndarray, num: int) -> list[int]:
    """Draw without replacement; once the law is used up, anything."""
    left, taken = law.copy(), []
    for _ in range(num):
        spent = not left.sum() > 0
        taken.append(int(rng.integers(len(law)) if spent else rng.choice(len(law), p=left / left.sum())))
        left[taken[-1]] = 0
    return taken
