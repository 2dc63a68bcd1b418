"""Trees from a multi-token-prediction head: one small attention layer fed by the target's hidden states.

The row for the hidden state at position P takes token P + 1, sits at rope position P and place P of the head's own
cache, and drafts token P + 2. What the head's own draft rows computed is dropped after each step: the accepted tokens
run through it once more with the target's hidden states, because keys made from the head's own hidden states let
acceptance decay.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from treewy.cache import AttentionSpec, CachePool
from treewy.cache.layer import AttentionLayer
from treewy.cache.policy import Reconstruct
from treewy.draft.base import Committed, Draft, Drafter, Root
from treewy.draft.growth import Growth, grow
from treewy.ops import attention
from treewy.packed import PackedTree, pack
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
    """Grows trees level by level from the head's logits: fixed shapes filled, budgets spent best first.

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
        tokens = _ids([token for rows in committed for token in rows.tokens], self.head)
        hidden = torch.cat([rows.hidden for rows in committed])
        y = self.head.forward(tokens, hidden, step.positions, step)
        self.cache.commit(step.pending(), [range(chain.num_rows) for chain in chains])
        for rows, end in zip(committed, tree.starts[1:], strict=True):
            self._root_hidden[rows.slot] = y[end - 1]

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """See `Drafter.propose`."""
        if not roots:
            return []
        slots = [self._slot_of[root.slot] for root in roots]
        hidden = torch.stack([self._root_hidden[root.slot] for root in roots])
        return grow(roots, _Rows(self.head, self.cache, slots, hidden).logits)


class _Level(NamedTuple):
    """What one level's attention needs to know."""

    seqs: list[int]  # sequences that still grow
    tree: PackedTree  # their rows so far
    order: list[int]  # where the packed rows' keys and values lie
    first_query: list[int]


class _Rows:
    """Rows of growing trees, run through the head a level at a time: each sees the committed prefix and its ancestors.

    Keys, values and outputs of all rows lie in the order in which they ran. The roots come first and ran when they were
    committed: a tree's root is the last committed place, so the prefix ends one place before it.
    """

    _level: _Level

    def __init__(self, head: MTPHead, cache: CachePool, slots: list[int], hidden: Float[Tensor, "R hidden"]) -> None:
        self.head, self.cache, self.slots = head, cache, slots
        self.lengths = [cache.length(slot) - 1 for slot in slots]
        self._outputs = hidden
        self._places = [[seq] for seq in range(len(slots))]  # of each sequence's rows, in the order of running
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._depth = 0

    def logits(self, growing: list[tuple[int, Growth]]) -> Float[Tensor, "R vocab"]:
        """Return the logits after the new rows of each tree that grows."""
        if self._depth:
            self._run(growing)
        self._depth += 1
        newest = [place for seq, growth in growing for place in self._places[seq][-growth.num_new :]]
        return self.head.logits(self._outputs[newest])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `Attends.attend`."""
        memory, level = self.cache.layers[layer], self._level
        assert isinstance(memory, AttentionLayer)
        if layer not in self._keys:
            self._keys[layer] = memory.keys[self.slots, self.lengths].to(k.dtype)
            self._values[layer] = memory.values[self.slots, self.lengths].to(v.dtype)
        self._keys[layer] = torch.cat([self._keys[layer], k])
        self._values[layer] = torch.cat([self._values[layer], v])
        return attention.verify(
            q,
            self._keys[layer][level.order],
            self._values[layer][level.order],
            memory.keys,
            memory.values,
            _ids([self.slots[seq] for seq in level.seqs], self.head),
            [self.lengths[seq] for seq in level.seqs],
            level.tree,
            scale=scale,
            first_query=level.first_query,
        )

    def _run(self, growing: list[tuple[int, Growth]]) -> None:
        """Run the new rows of each tree, from the outputs of their parents."""
        tokens: list[int] = []
        parents: list[int] = []
        positions: list[int] = []
        for seq, growth in growing:
            tokens += growth.tokens[-growth.num_new :]
            parents += [self._places[seq][row] for row in growth.parents[-growth.num_new :]]
            positions += [self.lengths[seq] + self._depth] * growth.num_new
        end = len(self._outputs)
        for seq, growth in growing:
            self._places[seq] += range(end, end + growth.num_new)
            end += growth.num_new
        seqs = [seq for seq, _ in growing]
        self._level = _Level(
            seqs=seqs,
            tree=pack([growth.tree for _, growth in growing], device=self.head.device),
            order=[place for seq in seqs for place in self._places[seq]],
            first_query=[len(growth.parents) - growth.num_new for _, growth in growing],
        )
        y = self.head.forward(_ids(tokens, self.head), self._outputs[parents], _ids(positions, self.head), self)
        self._outputs = torch.cat([self._outputs, y])


def _ids(ids: Sequence[int], head: MTPHead) -> Int[Tensor, "R"]:
    return torch.tensor(list(ids), dtype=torch.int64, device=head.device)
