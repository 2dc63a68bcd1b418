"""One step's view of the cache: layers read through it, and what they leave stays pending until commit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from treewy.cache.layer import AttentionLayer, LinearLayer
from treewy.cache.policy import Policy
from treewy.ops import attention, conv
from treewy.packed import PackedTree
from treewy.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from treewy.cache.pool import CachePool


class Batch(NamedTuple):
    """The rows of one step.

    Attributes:
        tree: Trees of all sequences.
        tokens: Token of each packed row.
        slots: Pool slot of each sequence, on the host.
        logit_rows: Packed rows whose logits are wanted; None for all.
        policy: Commit policy of this step; None for the pool's. Prefill commits every row, so it needs no snapshots.
    """

    tree: PackedTree
    tokens: Int[Tensor, "N"]
    slots: tuple[int, ...]
    logit_rows: Int[Tensor, "R"] | None = None
    policy: Policy | None = None


class LinearPending(NamedTuple):
    """A gated-delta layer's rows of the step: the policy's record and the conv inputs."""

    record: tuple[Tensor, ...]
    conv_inputs: Float[Tensor, "N C"]


class AttentionPending(NamedTuple):
    """A softmax layer's rows of the step."""

    k: Float[Tensor, "N HK E"]
    v: Float[Tensor, "N HK E"]


class PendingBytes(NamedTuple):
    """Bytes of the storages that a step holds until commit."""

    state: int
    conv: int
    kv: int


@dataclass(frozen=True)
class Pending:
    """What a verified step leaves until a path of it is committed or all of it is dropped."""

    policy: Policy
    tree: PackedTree
    slots: tuple[int, ...]
    versions: tuple[int, ...]
    layers: dict[int, LinearPending | AttentionPending]

    def bytes(self) -> PendingBytes:
        """Return the bytes of the real storages behind the pending tensors, each storage once."""
        linear = [x for x in self.layers.values() if isinstance(x, LinearPending)]
        softmax = [x for x in self.layers.values() if isinstance(x, AttentionPending)]
        return PendingBytes(
            state=storage_bytes(tensor for x in linear for tensor in x.record),
            conv=storage_bytes(x.conv_inputs for x in linear),
            kv=storage_bytes(tensor for x in softmax for tensor in x),
        )


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


M = TypeVar("M", LinearLayer, AttentionLayer)


@dataclass
class Step:
    """What a model's mixers call during one forward. Reads committed memory, writes nothing to it."""

    pool: "CachePool"
    policy: Policy
    tree: PackedTree
    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _layers: dict[int, LinearPending | AttentionPending] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.tree.device
        self.slot_tensor = torch.tensor(self.slots, dtype=torch.int64, device=device)
        base = torch.tensor([*self.lengths, 0], dtype=torch.int64, device=device)
        # Inert rows have sequence -1 and so take the last entry, 0.
        self.positions = base[self.tree.seq_of_row] + self.tree.depth
        self._versions = tuple(self.pool.version(slot) for slot in self.slots)

    def conv(
        self,
        layer: int,
        x: Float[Tensor, "N C"],
        weight: Float[Tensor, "C W"],
        bias: Float[Tensor, "C"] | None,
        activation: str | None,
    ) -> Float[Tensor, "N C"]:
        """Convolve the rows of gated-delta layer `layer` and keep their inputs."""
        memory = self._memory(layer, LinearLayer)
        self._inputs[layer] = x
        return conv.verify(x, weight, bias, memory.window, self.slot_tensor, self.tree, activation=activation)

    def delta(
        self,
        layer: int,
        q: Float[Tensor, "N H K"],
        k: Float[Tensor, "N H K"],
        v: Float[Tensor, "N HV V"],
        g: Float[Tensor, "N HV"],
        beta: Float[Tensor, "N HV"],
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "N HV V"]:
        """Run the gated delta rule of layer `layer` under the step's policy and keep its record."""
        memory = self._memory(layer, LinearLayer)
        verified = self.policy.verify(memory, q, k, v, g, beta, self.slot_tensor, self.tree, out_dtype)
        self._layers[layer] = LinearPending(verified.record, self._inputs.pop(layer))
        return verified.o

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "N HQ E"],
        k: Float[Tensor, "N HK E"],
        v: Float[Tensor, "N HK E"],
        *,
        scale: float,
    ) -> Float[Tensor, "N HQ E"]:
        """Attend in softmax layer `layer` and keep its keys and values."""
        memory = self._memory(layer, AttentionLayer)
        self._layers[layer] = AttentionPending(k, v)
        return attention.verify(
            q, k, v, memory.keys, memory.values, self.slot_tensor, self.lengths, self.tree, scale=scale
        )

    def pending(self) -> Pending:
        """Return what the forward left."""
        return Pending(self.policy, self.tree, self.slots, self._versions, dict(self._layers))

    def _memory(self, layer: int, kind: type[M]) -> M:
        memory = self.pool.layers[layer]
        if not isinstance(memory, kind):
            raise TypeError(f"Layer {layer} must be a {kind.__name__}; the pool holds a {type(memory).__name__}.")
        return memory
