"""Trees from a multi-token-prediction head: one small attention layer fed by the target's hidden states.

The row for the hidden state at position P takes token P + 1, sits at rope position P and place P of the head's own
cache, and drafts token P + 2. What the head's own draft rows computed is dropped after each step: the accepted tokens
run through it once more with the target's hidden states, because keys made from the head's own hidden states let
acceptance decay.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from treewy.cache import AttentionSpec, CachePool
from treewy.cache.layer import AttentionLayer
from treewy.cache.policy import Reconstruct
from treewy.draft.base import Committed, Draft, Drafter, Root
from treewy.ops import attention
from treewy.packed import PackedTree, pack
from treewy.sampling import draw_without_replacement
from treewy.shapes import Float, Int, Tensor
from treewy.tree import DraftTree


@runtime_checkable
class Attends(Protocol):
    """What a head's attention layers call: `Step.attend`, or its like while a tree grows."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Return each query's attention to its prefix and ancestors."""
        ...


class MTPHead(ABC):
    """The head port: a model's multi-token-prediction layers, with the target's embedding and LM head."""

    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def layer_specs(self) -> Sequence[AttentionSpec]:
        """Return the memory each of its layers needs."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "R"],
        hidden: Float[Tensor, "R hidden"],
        positions: Int[Tensor, "R"],
        step: Attends,
    ) -> Float[Tensor, "R hidden"]:
        """Return the head's hidden states, after its final norm, for rows of (hidden state, next token)."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """Apply the target's LM head."""


class MTPDrafter(Drafter):
    """Grows a tree level by level: each row's children are the head's most likely tokens after it, or drawn from its law.

    Args:
        head: The head.
        num_slots: Slots of the engine it drafts for.
        max_len: Most committed tokens of one sequence.
        poison: See `CachePool`.
    """

    @torch.inference_mode(False)
    def __init__(self, head: MTPHead, num_slots: int, *, max_len: int = 1 << 20, poison: bool = False) -> None:
        self.head = head
        self.cache = CachePool(
            head.layer_specs(),
            num_slots,
            Reconstruct(),
            dtype=head.dtype,
            device=head.device,
            max_len=max_len,
            poison=poison,
        )
        self._slot_of: dict[int, int] = {}
        self._root_hidden: dict[int, Tensor] = {}

    def allocate(self, slot: int) -> None:
        """See `Drafter.allocate`."""
        self._slot_of[slot] = self.cache.allocate()

    def free(self, slot: int) -> None:
        """See `Drafter.free`."""
        if slot in self._slot_of:
            self._root_hidden.pop(slot, None)
            self.cache.free(self._slot_of[slot])
            del self._slot_of[slot]

    def observe(self, committed: Sequence[Committed]) -> None:
        """Run the committed rows through the head once, with the target's hidden states."""
        if not committed:
            return
        chains = [DraftTree.chain(len(rows.tokens) - 1) for rows in committed]
        tree = pack(chains, device=self.head.device)
        step = self.cache.begin(tree, [self._slot_of[rows.slot] for rows in committed])
        tokens = self._tokens([token for rows in committed for token in rows.tokens])
        hidden = torch.cat([rows.hidden for rows in committed])
        y = self.head.forward(tokens, hidden, step.positions, step)
        self.cache.commit(step.pending(), [range(chain.num_rows) for chain in chains])
        for rows, end in zip(committed, tree.starts[1:], strict=True):
            self._root_hidden[rows.slot] = y[end - 1]

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """Grow every root's shape, all sequences level by level together."""
        tree = pack([root.shape for root in roots], device=self.head.device)
        # As in `_levels`: a root that drafts nothing is in no level.
        drafting = [self._root_hidden[root.slot] for root in roots if root.shape.num_drafts]
        hidden = torch.stack(drafting) if drafting else torch.empty(0)
        growth = _Growth(self.cache, tree, [self._slot_of[root.slot] for root in roots])
        tokens = self._tokens([0] * tree.num_rows)
        tokens[list(tree.starts[:-1])] = self._tokens([root.token for root in roots])
        laws: list[dict[int, Tensor]] = [{} for _ in roots]
        for level in _levels(tree):
            if level.depth > 0:
                growth.level = level
                hidden = self.head.forward(tokens[level.rows], hidden, growth.positions[level.rows], growth)
            children = self._children(self.head.logits(hidden), level, roots, laws)
            tokens[level.child_rows] = children[level.child_parents, level.child_ranks]
            hidden = hidden[level.next_parents]
        drafted = tokens.tolist()
        ends = zip(tree.starts, tree.starts[1:], strict=False)
        trees = [root.shape.with_tokens(drafted[a:b]) for root, (a, b) in zip(roots, ends, strict=True)]
        return [Draft(*pair) for pair in zip(trees, laws, strict=True)]

    def _children(
        self, logits: Float[Tensor, "R vocab"], level: "_Level", roots: Sequence[Root], laws: list[dict[int, Tensor]]
    ) -> Int[Tensor, "R X"]:
        """Return each row's children in order, and note in `laws` what drawn ones were drawn from."""
        children = logits.topk(level.max_children, dim=-1).indices
        for seq, (root, (first, rows, width)) in enumerate(zip(roots, level.spans, strict=True)):
            if root.draws is None or not rows:
                continue
            span = slice(first, first + len(rows))
            # A law that is not a number becomes one without support: its children are chosen.
            law = root.draws.law.probabilities(logits[span]).nan_to_num(0.0)
            uniforms = torch.from_numpy(root.draws.stream.uniform(len(rows), width)).to(logits.device)
            children[span, :width] = draw_without_replacement(law, uniforms)
            laws[seq].update(zip(rows, law, strict=True))
        return children

    def _tokens(self, ids: Sequence[int]) -> Int[Tensor, "R"]:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.head.device)


class _Level(NamedTuple):
    """Index tables of one level's forward: which rows run, and which rows their outputs fill."""

    depth: int
    rows: Int[Tensor, "R"]  # packed rows that run at this level
    prefix: PackedTree  # every tree down to this level
    prefix_rows: Int[Tensor, "N'"]  # packed rows of the full trees that `prefix` holds
    first_query: list[int]
    max_children: int
    spans: list[tuple[int, list[int], int]]  # per sequence: its first output, its rows, its most children
    child_rows: Int[Tensor, "X"]  # packed rows filled from this level's outputs
    child_parents: Int[Tensor, "X"]  # index into this level's outputs
    child_ranks: Int[Tensor, "X"]
    next_parents: Int[Tensor, "R'"]  # index into this level's outputs, for each row that runs at the next level


@lru_cache(maxsize=256)
def _levels(tree: PackedTree) -> list[_Level]:
    """Return the levels that have children somewhere, roots first."""
    shapes = [DraftTree(parents) for parents in tree.shapes]
    levels: list[_Level] = []
    for depth in range(tree.max_depth):
        runs = [_rows_at(shape, depth) if shape.max_depth > depth else [] for shape in shapes]
        next_runs = [_rows_at(shape, depth + 1) if shape.max_depth > depth + 1 else [] for shape in shapes]
        output_of = {
            (seq, row): place
            for place, (seq, row) in enumerate((seq, row) for seq, rows in enumerate(runs) for row in rows)
        }
        children = [
            (tree.starts[seq] + child, output_of[seq, row], rank)
            for seq, row in output_of
            for rank, child in enumerate(shapes[seq].children(row))
        ]
        parents = [output_of[seq, shapes[seq].parents[row]] for seq, rows in enumerate(next_runs) for row in rows]
        # Trees that end above this level stay whole in the prefix and ask nothing.
        kept = [sum(at <= depth for at in shape.depth.tolist()) for shape in shapes]
        levels.append(
            _Level(
                depth=depth,
                rows=_index([tree.starts[seq] + row for seq, rows in enumerate(runs) for row in rows], tree),
                prefix=pack([shape.prefix(n) for shape, n in zip(shapes, kept, strict=True)], device=tree.device),
                prefix_rows=_index([tree.starts[seq] + row for seq, n in enumerate(kept) for row in range(n)], tree),
                first_query=[n - len(rows) for n, rows in zip(kept, runs, strict=True)],
                max_children=max(rank for _, _, rank in children) + 1,
                spans=_spans(shapes, runs),
                child_rows=_index([row for row, _, _ in children], tree),
                child_parents=_index([parent for _, parent, _ in children], tree),
                child_ranks=_index([rank for _, _, rank in children], tree),
                next_parents=_index(parents, tree),
            )
        )
    return levels


def _spans(shapes: list[DraftTree], runs: list[list[int]]) -> list[tuple[int, list[int], int]]:
    spans, first = [], 0
    for shape, rows in zip(shapes, runs, strict=True):
        spans.append((first, rows, max((len(shape.children(row)) for row in rows), default=0)))
        first += len(rows)
    return spans


def _rows_at(shape: DraftTree, depth: int) -> list[int]:
    return [row for row, at in enumerate(shape.depth.tolist()) if at == depth]


def _index(rows: list[int], tree: PackedTree) -> Int[Tensor, "R"]:
    return torch.tensor(rows, dtype=torch.int64, device=tree.device)


class _Growth:
    """Attention of a tree's newest level: to the committed prefix, and to the rows drafted above.

    The tree's root is the last committed place, so the prefix ends one place before it.
    """

    level: _Level

    def __init__(self, cache: CachePool, tree: PackedTree, slots: Sequence[int]) -> None:
        self.cache, self.tree = cache, tree
        self.slots = torch.tensor(slots, dtype=torch.int64, device=tree.device)
        self.lengths = [cache.length(slot) - 1 for slot in slots]
        starts = torch.tensor(self.lengths, dtype=torch.int64, device=tree.device)
        self.positions = starts[tree.seq_of_row] + tree.depth
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `Attends.attend`."""
        memory = self.cache.layers[layer]
        assert isinstance(memory, AttentionLayer)
        if layer not in self._keys:
            self._keys[layer] = self._rooted(memory.keys, k)
            self._values[layer] = self._rooted(memory.values, v)
        keys, values = self._keys[layer], self._values[layer]
        keys[self.level.rows], values[self.level.rows] = k, v
        return attention.verify(
            q,
            keys[self.level.prefix_rows],
            values[self.level.prefix_rows],
            memory.keys,
            memory.values,
            self.slots,
            self.lengths,
            self.level.prefix,
            scale=scale,
            first_query=self.level.first_query,
        )

    def _rooted(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Return a buffer for the whole tree's rows that holds the roots' committed entries."""
        buffer = rows.new_zeros(self.tree.num_rows, *rows.shape[1:])
        last = torch.tensor(self.lengths, dtype=torch.int64, device=pool.device)
        buffer[list(self.tree.starts[:-1])] = pool[self.slots, last].to(rows.dtype)
        return buffer
