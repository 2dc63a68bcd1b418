"""The Target port: what an engine needs of a model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from treewy.cache import Batch, CachePool, LayerSpec, Pending
from treewy.shapes import Float, Tensor


class Verified(NamedTuple):
    """What one forward over a batch of trees gives.

    Attributes:
        logits: Of the rows in `Batch.logit_rows`, in that order, or of all rows.
        hidden: What the LM head sees (after the final norm), of all rows.
        pending: To be committed, or dropped.
    """

    logits: Float[Tensor, "R vocab"]
    hidden: Float[Tensor, "N hidden"]
    pending: Pending


class Target(ABC):
    """A model whose linear layers remember by a recurrent state and whose softmax layers remember keys and values."""

    vocab_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: torch.device
    max_len: int

    @abstractmethod
    def layer_specs(self) -> Sequence[LayerSpec]:
        """Return the memory each layer needs, in layer order."""

    @abstractmethod
    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        """Run every row of `batch` from its parent's state.

        Reads the committed memory of the batch's slots and writes nothing. Row t of a sequence has position
        (committed length + depth) and sees the committed prefix and its own ancestors only, so a row's result is that
        of its root path run as a chain. One root row without drafts is plain decoding; a chain of prompt tokens is
        prefill.
        """
