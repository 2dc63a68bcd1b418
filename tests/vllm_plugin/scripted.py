"""Engines whose requests have texts of their own, so that they can be compared with each other, token by token."""

import numpy as np
import torch

from treewy.ops import gdn
from treewy.vllm_plugin.check import materialised
from treewy.vllm_plugin.step import Drafted, Tables
from vllm_plugin.rows import DIM, HEADS, LAYERS, VALUE_HEADS, Engine

# Query, key, value and two gates side by side, as each head of values has them.
WIDE = 3 * DIM + 2
SEED = 2**33
PRIME = 1_000_003


def drafted(requests: list[int], rows: list[int], dtype: type = np.int32) -> Drafted:
    """Return a batch of these requests alone."""
    return Drafted(np.arange(len(requests)), np.array(requests, dtype), np.array(rows, dtype))


class Scripted(Engine):
    """Gives each token of a request its row, whatever runs beside it, and noise to drafts that are not accepted.

    Args:
        kept_rows: Rows that a request may keep.
        wrong: Decides the rows of rejected drafts.

    Attributes:
        outputs_of: By request, the outputs [L, HV, V] of each token that it has.
        captured: Tables that a graph was captured with, which every step uses then; else each uses its own.
    """

    def __init__(self, kept_rows: int, *, wrong: int = 1) -> None:
        super().__init__(kept_rows)
        self.outputs_of: dict[int, list[torch.Tensor]] = {}
        self.wrong = wrong
        self.captured: tuple[int, int, Tables] | None = None

    def capture(self, num_seqs: int, num_rows: int, tables: Tables) -> None:
        """Run every step with the tables of a captured graph from now on, and as many sequences and rows as it has."""
        self.captured = num_seqs, num_rows, tables

    def verify(
        self,
        requests: list[int],
        slots: list[int],
        rows: list[int],
        sampled: list[int],
        *,
        padding: int = 0,
        null: int = -1,
    ) -> list[torch.Tensor]:
        """Run a step: verify chains, then accept of each the root and `sampled` - 1 drafts; return outputs of all rows.

        Args:
            requests: Their indices.
            slots: Their pages.
            rows: Rows of each.
            sampled: Tokens that each samples; none, where more of its prompt is to come.
            padding: Sequences and rows more than there are.
            null: Page of sequences that are none.
        """
        total = sum(rows)
        num_seqs, num_rows = len(requests) + padding, total + padding
        if self.captured is not None:
            num_seqs, num_rows, _ = self.captured
        self.step.begin(drafted(requests, rows), num_seqs, num_rows)
        tables = self.step.tables if self.captured is None else self.captured[2]
        assert tables is not None
        outputs = self.forward(
            tables, slots + [null] * (num_seqs - len(slots)), self._rows(requests, rows, sampled, num_rows)
        )
        of_layers = torch.stack(outputs)[:, :total].split(rows, dim=1)
        for request, out, count in zip(requests, of_layers, sampled, strict=True):
            self.outputs_of.setdefault(request, []).extend(out[:, : max(1, count)].unbind(1))
        self.step.finish(torch.tensor(sampled))
        return outputs

    def forward(self, tables: Tables, slots: list[int], given: torch.Tensor) -> list[torch.Tensor]:
        """Run the rule of all layers on rows [L, N, HV, WIDE]; outputs are poisoned before."""
        outputs, at = [], torch.tensor(slots, dtype=torch.int32)
        for layer, x in enumerate(given):
            q, k, v = (part.contiguous() for part in x[..., : 3 * DIM].split(DIM, dim=-1))
            operands = gdn.Projections(q[:, :HEADS], k[:, :HEADS], v, x[..., -2], x[..., -1], *self.gates)
            kept = self.memory.kept.layer(layer)
            prior = gdn.Prior(kept, None, None, tables.fold, places=tables.places)
            out = gdn.Verified(torch.full_like(v, torch.nan), self.memory.step_of(layer, len(v)))
            gdn.commit_verify(operands, self.states[layer], at, tables.tree, prior=prior, out=out, backend="eager")
            outputs.append(out.o)
        return outputs

    def _rows(self, requests: list[int], rows: list[int], sampled: list[int], num_rows: int) -> torch.Tensor:
        """Return rows of all layers: of tokens that are accepted, the text's; of others, noise; of nobody, NaN."""
        given = torch.full((LAYERS, num_rows, VALUE_HEADS, WIDE), torch.nan)
        at = 0
        for request, size, count in zip(requests, rows, sampled, strict=True):
            for place in range(size):
                token = len(self.outputs_of.get(request, [])) + place
                noise = 0 if place < max(1, count) else self.wrong
                random = torch.Generator().manual_seed((request * PRIME + token) * PRIME + noise)
                given[:, at + place] = torch.randn(LAYERS, VALUE_HEADS, WIDE, generator=random)
            at += size
        return given

    def state(self, request: int, slot: int) -> torch.Tensor:
        """Return a request's states with what it keeps in them, of all layers [L, HV, V, K]."""
        histories = [self.memory.kept.layer(layer) for layer in range(LAYERS)]
        parts = zip(self.states, histories, strict=True)
        return torch.stack([materialised(state[slot].double(), kept, request) for state, kept in parts])


def plain(request: int, slot: int, num_tokens: int) -> Scripted:
    """Return an engine in which a request has run alone and without drafts."""
    engine = Scripted(4)
    for _ in range(num_tokens):
        engine.verify([request], [slot], [1], [1])
    return engine


def distance(here: torch.Tensor, there: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((here.double() - there.double()).abs().max() / there.double().abs().max())
