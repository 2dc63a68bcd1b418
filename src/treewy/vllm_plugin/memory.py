"""What the worker keeps beside vLLM's pages: the rows of this step, and rows that are accepted but not in the state yet.

A page keeps one committed state and nothing more: as many fit as without drafting. Rows belong to requests, of which there
are far fewer than pages, so they lie in buffers of their own, made while the model is built: vLLM counts them as weights.
"""

from typing import NamedTuple

import torch

from treewy.ops.gdn import History, Record, StackedHistory, StackedRecord
from treewy.shapes import Int, Tensor


class Sizes(NamedTuple):
    """What decides how much memory the rows take, per worker.

    Attributes:
        num_layers: Gated DeltaNet layers (L).
        num_requests: Requests that run at once (R), `max_num_seqs`.
        step_rows: Rows of one request's tree, its root among them (T).
        kept_rows: Rows that a request may keep outside the state (C).
        max_path: Rows that one step can accept: T of a chain, depth + 1 of a tree (P).
        num_step_rows: Rows of all requests of one step, padding of captured graphs included.
        num_heads: Key heads of this worker (H).
        num_value_heads: Value heads of this worker (HV).
        key_dim: K.
        value_dim: V.
        u_dtype: Of pseudo-values: float32, or bfloat16 beside states in bfloat16.
        k_dtype: Of keys: the model's.
    """

    num_layers: int
    num_requests: int
    step_rows: int
    kept_rows: int
    max_path: int
    num_step_rows: int
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    u_dtype: torch.dtype
    k_dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer: pseudo-values, keys and two decays in float32."""
        u = self.num_value_heads * self.value_dim * self.u_dtype.itemsize
        k = self.num_heads * self.key_dim * self.k_dtype.itemsize
        return u + k + 2 * 4 * self.num_value_heads

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows and of the requests' counts of them."""
        rows = self.num_step_rows + self.num_requests * self.kept_rows
        return self.num_layers * rows * self.row_bytes + 4 * self.num_requests


class Memory:
    """Rows of all layers, the layers' axis first, and how many each request keeps.

    Attributes:
        step: Record of this step's rows [L, N, ...]; each layer writes its own.
        kept: Histories [L, R, C, ...], by request; what lies behind `lengths` is never read.
        lengths: Kept rows of each request, the same in all layers.
    """

    def __init__(self, sizes: Sizes, device: torch.device | str) -> None:
        """Allocate everything that later steps write."""
        self.sizes = sizes
        layers, heads = (sizes.num_layers,), (sizes.num_heads, sizes.key_dim)
        values = (sizes.num_value_heads, sizes.value_dim)

        def rows(*leading: int) -> StackedRecord:
            shape = layers + leading
            # Said out loud: models are built under a default dtype of their own.
            decays = [torch.zeros(*shape, sizes.num_value_heads, dtype=torch.float32, device=device) for _ in range(2)]
            u = torch.zeros(*shape, *values, dtype=sizes.u_dtype, device=device)
            return StackedRecord(u, torch.zeros(*shape, *heads, dtype=sizes.k_dtype, device=device), *decays)

        self.step = rows(sizes.num_step_rows)
        kept = rows(sizes.num_requests, sizes.kept_rows)
        self.lengths: Int[Tensor, "R"] = torch.zeros(sizes.num_requests, dtype=torch.int32, device=device)
        self.kept = StackedHistory(*kept, self.lengths)
        self._kept_of = [self.kept.layer(layer) for layer in range(sizes.num_layers)]  # views cost time to make

    def step_of(self, layer: int, num_rows: int) -> Record:
        """Return where a layer writes the record of the step's first `num_rows` rows."""
        return Record(*(part[layer, :num_rows] for part in self.step))

    def kept_of(self, layer: int) -> History:
        """Return a layer's histories."""
        return self._kept_of[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything, summed over the tensors themselves."""
        return sum(part.untyped_storage().nbytes() for part in (*self.step, *self.kept))
