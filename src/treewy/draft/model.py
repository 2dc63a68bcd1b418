"""Trees from a second, smaller model with the target's vocabulary."""

from collections.abc import Sequence

import torch

from treewy.cache import Batch, CachePool
from treewy.cache.policy import Reconstruct
from treewy.draft.base import Committed, Draft, Drafter, Root
from treewy.draft.growth import Growth, grow
from treewy.draft.shape import cut_to_depth
from treewy.errors import RequestError
from treewy.model import Target
from treewy.packed import pack
from treewy.shapes import Float, Int, Tensor
from treewy.tree import DraftTree


class ModelDrafter(Drafter):
    """Grows trees level by level from a draft model's logits, in step with what the target commits.

    The model's memory holds the committed tokens and nothing else. Each level verifies the rows so far again, from that
    memory, and drops what it computed: as many forwards as the tree has levels.

    Sequences may outgrow the model's context: what passes its end is not drafted.

    Args:
        model: The draft model.
        num_slots: Slots of the engine it drafts for.
        vocab_size: The target's.
        poison: See `CachePool`.

    Raises:
        RequestError: the vocabularies differ in size.
    """

    @torch.inference_mode(False)
    def __init__(self, model: Target, num_slots: int, *, vocab_size: int, poison: bool = False) -> None:
        if model.vocab_size != vocab_size:
            raise RequestError(
                f"A draft model must have the target's vocabulary of {vocab_size} tokens; it has {model.vocab_size}. "
                "Use a smaller model of the target's family."
            )
        self.model = model
        self.cache = CachePool(
            model.layer_specs(),
            num_slots,
            Reconstruct(),
            dtype=model.dtype,
            state_dtype=model.state_dtype,
            device=model.device,
            max_len=model.max_len,
            poison=poison,
        )
        self._slot_of: dict[int, int] = {}
        self._outgrown: set[int] = set()

    def allocate(self, slot: int) -> None:
        """See `Drafter.allocate`."""
        self._slot_of[slot] = self.cache.allocate()

    def free(self, slot: int) -> None:
        """See `Drafter.free`."""
        if slot in self._slot_of:
            self._outgrown.discard(slot)
            self.cache.free(self._slot_of[slot])
            del self._slot_of[slot]

    def observe(self, committed: Sequence[Committed]) -> None:
        """Run the committed rows' own tokens through the model, and commit them all."""
        for rows in committed:
            if self.cache.length(self._slot_of[rows.slot]) + len(rows.tokens) > self.model.max_len:
                self._outgrown.add(rows.slot)
        # A sequence that has outgrown the context has a gap in the model's memory: it stays behind for good.
        followed = [rows for rows in committed if rows.slot not in self._outgrown]
        if not followed:
            return
        chains = [[rows.first, *rows.tokens[:-1]] for rows in followed]
        packed = pack([DraftTree.chain(len(chain) - 1) for chain in chains], device=self.model.device)
        tokens = self._ids([token for chain in chains for token in chain])
        slots = tuple(self._slot_of[rows.slot] for rows in followed)
        verified = self.model.verify(Batch(packed, tokens, slots, logit_rows=self._ids([])), self.cache)
        self.cache.commit(verified.pending, [range(len(chain)) for chain in chains])

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        """See `Drafter.propose`."""
        slots = [self._slot_of[root.slot] for root in roots]

        def logits(growing: list[tuple[int, Growth]]) -> Float[Tensor, "R vocab"]:
            growths = [growth for _, growth in growing]
            packed = pack([growth.tree for growth in growths], device=self.model.device)
            tokens = self._ids([token for growth in growths for token in growth.tokens])
            ends = zip(growths, packed.starts[1:], strict=True)
            newest = self._ids([row for growth, end in ends for row in range(end - growth.num_new, end)])
            batch = Batch(packed, tokens, tuple(slots[seq] for seq, _ in growing), logit_rows=newest)
            return self.model.verify(batch, self.cache).logits

        return grow([self._within_context(root) for root in roots], logits)

    def _within_context(self, root: Root) -> Root:
        """Cut the shape to rows that the model can run: its leaves need not be."""
        left = self.model.max_len - self.cache.length(self._slot_of[root.slot])
        return root._replace(shape=cut_to_depth(root.shape, 0 if root.slot in self._outgrown else left))

    def _ids(self, ids: Sequence[int]) -> Int[Tensor, "R"]:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.model.device)
