"""The pool of slots that sequences live in, and the only place that writes to them."""

from collections.abc import Sequence

import torch

from treewy.cache.layer import AttentionLayer, AttentionSpec, LayerSpec, LinearLayer
from treewy.cache.policy import Policy
from treewy.cache.step import AttentionPending, LinearPending, Pending, Step, storage_bytes
from treewy.errors import CapacityError
from treewy.ops import attention, conv, gdn
from treewy.ops.gdn import History
from treewy.ops.slots import INERT
from treewy.packed import PackedTree, pack_paths
from treewy.tree import topology


class CachePool:
    """Memory of all layers for `num_slots` sequences.

    A slot goes through allocate, any number of (begin, commit), free. A step reads; `commit` writes, to all layers or,
    if it fails half way, to none that can still be read: such a slot is torn until freed. `materialize` moves committed
    rows from histories into states, which changes where a sequence's memory lies and not what it is.

    Args:
        specs: One per layer, in layer order.
        num_slots: Sequences that can live at once.
        policy: Commit policy of the gated-delta layers.
        dtype: Dtype of conv windows, keys and values.
        state_dtype: Dtype of recurrent states.
        device: Where it all lives.
        max_len: Most committed tokens of one sequence.
        poison: Fill free slots with NaN; costs a write per freed slot, shows reads of stale memory.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_slots: int,
        policy: Policy,
        *,
        dtype: torch.dtype,
        state_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_len: int = 1 << 20,
        poison: bool = False,
    ) -> None:
        if num_slots < 1:
            raise CapacityError(f"A pool must have at least one slot; got {num_slots}. Raise max_num_seqs.")
        self.policy, self.num_slots, self.max_len = policy, num_slots, max_len
        self.device = torch.device(device)
        history = policy.num_history_rows
        self.layers = [_make_layer(spec, num_slots, dtype, state_dtype or dtype, device, history) for spec in specs]
        self._poison = poison
        self._free = list(range(num_slots))[::-1]
        self._lengths: dict[int, int] = {}
        self._versions = [0] * num_slots
        self._torn: set[int] = set()
        if poison:
            for slot in range(num_slots):
                self._poison_slot(slot)

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can still give."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free slot and make it the memory of an empty sequence.

        Raises:
            CapacityError: none is free.
        """
        if not self._free:
            raise CapacityError(
                f"A free slot is needed; all {self.num_slots} are taken. Free one or raise max_num_seqs."
            )
        slot = self._free.pop()
        for layer in self.layers:
            layer.reset(slot)
        self._lengths[slot] = 0
        self._versions[slot] += 1
        return slot

    def free(self, slot: int) -> None:
        """Give `slot` back. What is pending for it is stale from now on.

        Raises:
            CapacityError: the slot is not taken.
        """
        self._require_taken(slot)
        del self._lengths[slot]
        self._torn.discard(slot)
        self._versions[slot] += 1
        self._free.append(slot)
        if self._poison:
            self._poison_slot(slot)

    def length(self, slot: int) -> int:
        """Committed tokens of `slot`; 0 for the inert slot."""
        if slot == INERT:
            return 0
        self._require_taken(slot)
        return self._lengths[slot]

    def version(self, slot: int) -> int:
        """Count of changes to `slot`; what was pending at an older version is stale."""
        return 0 if slot == INERT else self._versions[slot]

    def begin(self, tree: PackedTree, slots: Sequence[int], policy: Policy | None = None) -> Step:
        """Open a step over these sequences; -1 marks an inert one. `policy` overrides the pool's for this step.

        A policy that keeps no history reads states alone: the slots are materialized for it.

        Raises:
            CapacityError: a slot is not taken, taken twice, torn, or its longest path would pass `max_len`.
        """
        policy = policy or self.policy
        taken = [slot for slot in slots if slot != INERT]
        if len(set(taken)) != len(taken):
            raise CapacityError(
                f"Two sequences must not share a slot; got slots {list(slots)}. Allocate one per sequence."
            )
        lengths = tuple(self.length(slot) for slot in slots)
        for slot, length, parents in zip(slots, lengths, tree.shapes, strict=True):
            self._require_whole(slot)
            longest = 1 + int(topology(parents).depth.max())
            if length + longest > self.max_len and slot != INERT:
                raise CapacityError(
                    f"A sequence must stay within {self.max_len} tokens; slot {slot} holds {length} and the step's "
                    f"longest path has {longest}. Shorten the tree."
                )
        if not policy.num_history_rows:
            self._materialize(taken)
        return Step(self, policy, tree, tuple(slots), lengths)

    def commit(self, pending: Pending, paths: Sequence[Sequence[int]]) -> None:
        """Write each sequence's accepted path to every layer; an empty path changes nothing.

        Raises:
            CapacityError: the pending step is stale, already committed, lacks a layer, or died in an earlier commit.
        """
        path = pack_paths(pending.tree, paths)
        self._check_pending(pending)
        slots = torch.tensor(pending.slots, dtype=torch.int64, device=self.device)
        lengths = [self.length(slot) for slot in pending.slots]
        written = [slot for slot, nodes in zip(pending.slots, path.paths, strict=True) if nodes and slot != INERT]
        longest = max((a + b for a, b in zip(lengths, path.lengths, strict=True)), default=0)
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.reserve(longest, fill=torch.nan if self._poison else 0.0)
        self._torn.update(written)
        for index, layer in enumerate(self.layers):
            rows = pending.layers[index]
            if isinstance(layer, LinearLayer) and isinstance(rows, LinearPending):
                pending.policy.commit(layer, slots, rows.record, path)
                conv.commit(layer.window, slots, rows.conv_inputs, path)
            elif isinstance(layer, AttentionLayer) and isinstance(rows, AttentionPending):
                attention.commit(layer.keys, layer.values, slots, lengths, rows.k, rows.v, path)
        for slot, nodes in zip(pending.slots, path.paths, strict=True):
            if nodes and slot != INERT:
                self._lengths[slot] += len(nodes)
                self._versions[slot] += 1
        self._torn.difference_update(written)

    def materialize(self, slot: int) -> None:
        """Make the states of `slot` current: fold what its histories hold; nothing to do if they are empty.

        The sequence's memory stays what it was, so its version stays, and what is pending for it can still be committed.

        Raises:
            CapacityError: the slot is not taken, or torn.
        """
        if slot != INERT:
            self._require_taken(slot)
            self._require_whole(slot)
            self._materialize([slot])

    def slot_bytes(self, slot: int) -> tuple[int, int, int]:
        """Return committed (state, conv, kv) bytes of one slot; state counts its whole history, kv committed places only."""
        state = sum(x.state_bytes(slot) for x in self.layers if isinstance(x, LinearLayer))
        window = sum(x.window[slot].nbytes for x in self.layers if isinstance(x, LinearLayer))
        softmax = [x for x in self.layers if isinstance(x, AttentionLayer)]
        kv = sum(x.keys[slot, : self.length(slot)].nbytes * 2 for x in softmax)
        return state, window, kv

    def pool_bytes(self) -> int:
        """Return the bytes of the pool's real storages."""
        return storage_bytes(x for layer in self.layers for x in layer.tensors())

    def check_integrity(self) -> None:
        """Check that every slot is either free once or taken once, and that none is torn.

        Raises:
            CapacityError: the bookkeeping does not add up.
        """
        taken = set(self._lengths)
        if len(set(self._free)) != len(self._free) or taken & set(self._free):
            raise CapacityError(
                f"Every slot must be free once or taken once; free {self._free}, taken {sorted(taken)}."
            )
        if len(taken) + len(self._free) != self.num_slots:
            raise CapacityError(
                f"Slots must not leak; {self.num_slots} exist, {len(taken)} taken, {len(self._free)} free."
            )
        if self._torn:
            raise CapacityError(f"No slot may stay torn; slots {sorted(self._torn)} died in a commit. Free them.")
        for layer in self.layers:
            longest = max(self._lengths.values(), default=0)
            if isinstance(layer, AttentionLayer) and longest > layer.num_places:
                raise CapacityError(f"Committed places must exist; length {longest} of {layer.num_places} places.")
        for slot, length in self._lengths.items():
            held = {int(history.lengths[slot]) for _, history in self._histories()}
            if len(held) > 1 or not all(0 <= rows <= length for rows in held):
                raise CapacityError(
                    f"Layers must hold the same committed rows in their histories; slot {slot} has {length} tokens and "
                    f"histories of {sorted(held)} rows. Free it and prefill its sequence again."
                )

    def _histories(self) -> list[tuple[LinearLayer, History]]:
        linear = [layer for layer in self.layers if isinstance(layer, LinearLayer)]
        return [(layer, layer.history) for layer in linear if layer.history is not None]

    def _materialize(self, taken: Sequence[int]) -> None:
        histories = self._histories()
        slots = torch.tensor(taken, dtype=torch.int64, device=self.device)
        # Layers are folded one by one, like layers of a commit: dying between them tears.
        if histories:
            self._torn.update(taken)
            for layer, history in histories:
                gdn.fold(layer.state, slots, history)
            self._torn.difference_update(taken)

    def _check_pending(self, pending: Pending) -> None:
        # A commit that died is not tried again: the layers it reached would move twice.
        for slot in pending.slots:
            self._require_whole(slot)
        missing = sorted(set(range(len(self.layers))) - set(pending.layers))
        if missing:
            raise CapacityError(
                f"A commit takes all layers or none; the step left nothing for layers {missing}. Rerun it."
            )
        now = tuple(self.version(slot) for slot in pending.slots)
        if now != pending.versions:
            raise CapacityError(
                f"A step is committed once, to the memory it read; slots {list(pending.slots)} were at versions "
                f"{list(pending.versions)} and are at {list(now)}. Verify again."
            )

    def _require_taken(self, slot: int) -> None:
        if slot not in self._lengths:
            raise CapacityError(f"A slot must be taken before use; slot {slot} is not. Allocate it first.")

    def _require_whole(self, slot: int) -> None:
        if slot in self._torn:
            raise CapacityError(
                f"A slot must hold a whole commit; slot {slot} died in one. Free it and prefill its sequence again."
            )

    def _poison_slot(self, slot: int) -> None:
        for layer in self.layers:
            layer.poison(slot)


def _make_layer(
    spec: LayerSpec,
    num_slots: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device | str,
    num_history_rows: int,
) -> LinearLayer | AttentionLayer:
    if isinstance(spec, AttentionSpec):
        return AttentionLayer(spec, num_slots, dtype=dtype, device=device)
    return LinearLayer(
        spec, num_slots, dtype=dtype, state_dtype=state_dtype, device=device, num_history_rows=num_history_rows
    )
