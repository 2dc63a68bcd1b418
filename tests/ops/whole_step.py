"""A whole step of a hybrid model on the ops alone: static buffers, every tree, nothing from the host.

Projections are random and the rest of a model is left out; what has memory is all there: convolution windows, states,
histories and pages, tables of trees, acceptance, and the ledger of histories.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from treewy.ops import accept, attention, conv, gdn
from treewy.ops import tree as trees
from treewy.ops.attention import Paged
from treewy.ops.gdn import History, Prior, Projections, Record, Verified
from treewy.ops.gdn.ledger import choose_folds, settle
from treewy.packed import PathTables
from treewy.shapes import Tensor
from treewy.tree import DraftTree

WIDTH = 4


class Sizes(NamedTuple):
    """A model and the bounds of its batch."""

    hidden: int = 256
    num_heads: int = 16
    num_value_heads: int = 32
    dim: int = 128
    num_query_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 256
    num_linear: int = 30
    num_softmax: int = 10
    vocab: int = 512
    num_seqs: int = 4
    max_rows: int = 16
    max_path: int = 8
    capacity: int = 16
    num_slots: int = 6
    page: int = 16
    num_pages: int = 16
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.bfloat16

    @property
    def num_rows(self) -> int:
        """Rows of the packed axis."""
        return self.num_seqs * self.max_rows

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.num_heads * self.dim
        return keys, keys, self.num_value_heads * self.dim


class WholeStep:
    """The step of one batch: `load` the step's trees, then `run`, which may be captured."""

    def __init__(self, sizes: Sizes, backend: str, delta: str, device: str, seed: int = 0) -> None:
        self.sizes, self.backend, self.delta, self.device = sizes, backend, delta, device
        self._random = torch.Generator("cpu").manual_seed(seed)
        s = sizes
        wide = sum(s.parts) + 2 * s.num_value_heads
        attending = (s.num_query_heads + 2 * s.num_kv_heads) * s.head_dim
        self.embed = self._weights(s.vocab, s.hidden)
        self.linear_in, self.linear_out = (
            self._stack(s.num_linear, s.hidden, wide),
            self._stack(s.num_linear, s.parts[2], s.hidden),
        )
        self.softmax_in = self._stack(s.num_softmax, s.hidden, attending)
        self.softmax_out = self._stack(s.num_softmax, s.num_query_heads * s.head_dim, s.hidden)
        self.taps = self._weights(s.num_linear, sum(s.parts), WIDTH)
        self.a_log, self.dt_bias = (self._weights(s.num_linear, s.num_value_heads).float() for _ in range(2))
        self._make_memory()
        self._make_buffers()

    def _weights(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._random) * shape[-2] ** -0.5
        return drawn.to(self.sizes.dtype).to(self.device)

    def _stack(self, count: int, rows: int, columns: int) -> list[Tensor]:
        return [self._weights(rows, columns) for _ in range(count)]

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*shape, dtype=dtype or self.sizes.dtype, device=self.device)

    def _make_memory(self) -> None:
        s, u = self.sizes, self.sizes.state_dtype
        self.windows = self._zeros(s.num_linear, s.num_slots, WIDTH - 1, sum(s.parts))
        shape = (s.num_linear, s.num_slots, s.num_value_heads, s.dim, s.dim)
        self.states = self._zeros(*shape, dtype=s.state_dtype)
        rows = (s.num_linear, s.num_slots, s.capacity)
        self.history = History(
            self._zeros(*rows, s.num_value_heads, s.dim, dtype=u),
            self._zeros(*rows, s.num_heads, s.dim),
            *(self._zeros(*rows, s.num_value_heads, dtype=torch.float32) for _ in range(2)),
            self._zeros(s.num_slots, dtype=torch.int32),
        )
        pool = (s.num_softmax, s.num_seqs * s.num_pages, s.page, s.num_kv_heads, s.head_dim)
        self.keys, self.values = self._zeros(*pool), self._zeros(*pool)
        pages = torch.randperm(s.num_seqs * s.num_pages, generator=self._random).view(s.num_seqs, -1)
        self.block_tables = pages.to(torch.int32).to(self.device)
        self.lengths = self._zeros(s.num_seqs, dtype=torch.int32)

    def _make_buffers(self) -> None:
        s = self.sizes
        self.tokens, self.parents = (self._zeros(s.num_rows, dtype=torch.int32) for _ in range(2))
        self.cu_rows = self._zeros(s.num_seqs + 1, dtype=torch.int32)
        self.slots = torch.arange(1, s.num_seqs + 1, dtype=torch.int32, device=self.device)
        self.tables = trees.empty(s.num_seqs, s.num_rows, s.max_rows, self.device)
        self.accepted = accept.empty(s.num_seqs, s.max_path, s.max_rows, self.device)
        self.pending = PathTables(
            self._zeros(s.num_seqs, s.max_path, dtype=torch.int32), self._zeros(s.num_seqs, dtype=torch.int32)
        )
        self.fold, self.held = (self._zeros(s.num_seqs, dtype=torch.int32) for _ in range(2))
        self.out, self.records = ([self._verified() for _ in range(s.num_linear)] for _ in range(2))
        self.convolved = [self._zeros(s.num_rows, sum(s.parts)) for _ in range(s.num_linear)]
        self.inputs = self._zeros(s.num_linear, s.num_rows, sum(s.parts))
        self.rows_kv = self._zeros(s.num_softmax, 2, s.num_rows, s.num_kv_heads, s.head_dim)
        self.scratch = None
        if self.backend == "triton":
            places = s.num_pages * s.page
            self.scratch = attention.workspace(s.num_rows, s.num_query_heads, s.head_dim, places, device=self.device)

    def _verified(self) -> Verified:
        s = self.sizes
        u = self._zeros(s.num_rows, s.num_value_heads, s.dim, dtype=s.state_dtype)
        high, low = (self._zeros(s.num_rows, s.num_value_heads, dtype=torch.float32) for _ in range(2))
        k = self._zeros(s.num_rows, s.num_heads, s.dim)
        return Verified(self._zeros(s.num_rows, s.num_value_heads, s.dim), Record(u, k, high, low))

    def memory(self) -> list[Tensor]:
        """Return all that a step leaves."""
        kept = [self.windows, self.states, *self.history, self.keys, self.values, self.lengths, self.accepted.tokens]
        kept += [x for out in self.records for x in out.record]
        return [*kept, *self.pending]

    def load(self, drafts: Sequence[DraftTree], seed: int) -> None:
        """Bring the step's trees, with random tokens."""
        s = self.sizes
        flat = [parent for draft in drafts for parent in draft.parents]
        flat += [-1] * (s.num_rows - len(flat))
        starts = [0]
        for draft in drafts:
            starts.append(starts[-1] + draft.num_rows)
        tokens = torch.randint(s.vocab, (s.num_rows,), generator=torch.Generator().manual_seed(seed))
        self.parents.copy_(torch.tensor(flat))
        self.cu_rows.copy_(torch.tensor(starts))
        self.tokens.copy_(tokens)

    def run(self) -> None:
        """Verify, accept and commit, from the static buffers into the memory."""
        s, backend = self.sizes, self.backend
        trees.tables(self.parents, self.cu_rows, max_rows=s.max_rows, out=self.tables, backend=backend)
        lengths = self.history.lengths
        choose_folds(lengths, self.slots, self.pending.lengths, s.capacity, out=self.fold, backend=backend)
        torch.index_select(lengths, 0, self.slots, out=self.held)
        x = self.embed[self.tokens.long()]
        softmax_after = -(-s.num_linear // max(s.num_softmax, 1))
        attended = 0
        for layer in range(s.num_linear):
            x = x + self._linear(layer, x)
            if (layer + 1) % softmax_after == 0 and attended < s.num_softmax:
                x, attended = x + self._softmax(attended, x), attended + 1
        logits = torch.nn.functional.layer_norm(x.float(), (s.hidden,)) @ self.embed.float().T
        # A peak per row that is one of its children's tokens more often than not, so that paths grow.
        accept.greedy(self.tables, self.tokens, logits, slots=self.slots, out=self.accepted, backend=backend)
        self._commit()

    def _linear(self, layer: int, x: Tensor) -> Tensor:
        s = self.sizes
        mixed, a, b = (x @ self.linear_in[layer]).split([sum(s.parts), s.num_value_heads, s.num_value_heads], dim=1)
        self.inputs[layer].copy_(mixed)
        q, k, v = conv.verify_split(
            mixed, self.taps[layer], None, self.windows[layer], self.slots, self.tables, s.parts,
            out=self.convolved[layer], backend=self.backend,
        )  # fmt: skip
        rows = Projections(
            q.unflatten(1, (-1, s.dim)), k.unflatten(1, (-1, s.dim)), v.unflatten(1, (-1, s.dim)),
            a.contiguous(), b.contiguous(), self.a_log[layer], self.dt_bias[layer],
        )  # fmt: skip
        *parts, lengths = self.history
        prior = Prior(
            History(*(part[layer] for part in parts), lengths),
            self.records[layer].record,
            self.pending,
            self.fold,
            self.held,
        )
        out = self.out[layer]
        gdn.commit_verify(rows, self.states[layer], self.slots, self.tables, prior=prior, out=out, backend=self.delta)
        return out.o.flatten(1) @ self.linear_out[layer]

    def _softmax(self, layer: int, x: Tensor) -> Tensor:
        s = self.sizes
        heads = (x @ self.softmax_in[layer]).unflatten(1, (-1, s.head_dim))
        q, k, v = heads.split([s.num_query_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        self.rows_kv[layer, 0].copy_(k)
        self.rows_kv[layer, 1].copy_(v)
        o = attention.verify_paged(
            q.contiguous(), *self.rows_kv[layer], self._pages(layer), self.tables, scale=s.head_dim**-0.5,
            scratch=self.scratch, backend=self.backend,
        )  # fmt: skip
        return o.flatten(1) @ self.softmax_out[layer]

    def _pages(self, layer: int) -> Paged:
        return Paged(self.keys[layer], self.values[layer], self.block_tables, self.lengths)

    def _commit(self) -> None:
        path, backend = self.accepted.path, self.backend
        conv.commit(self.windows, self.slots, self.inputs, path, backend=backend)
        for layer in range(self.sizes.num_softmax):
            attention.commit_paged(self._pages(layer), *self.rows_kv[layer], path, backend=backend)
        settle(self.history.lengths, self.slots, self.pending.lengths, self.fold, backend=backend)
        self.lengths += path.lengths
        for new, kept in zip(self.out, self.records, strict=True):
            for ours, theirs in zip(new.record, kept.record, strict=True):
                theirs.copy_(ours)
        self.pending.rows.copy_(path.rows)
        self.pending.lengths.copy_(path.lengths)
