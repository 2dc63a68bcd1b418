"""Held-out figures over documents longer than the training length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Model
from tokenizers import Tokenizer
from torch import Tensor

LENGTH, STRIDE = 1024, 512


def windows(document: str, tokenizer: Tokenizer) -> Iterator[tuple[Tensor, int]]:
    """Windows [1, <= LENGTH + 1] over end-of-text plus the document, and the first target each one scores.

    Every token is scored once, with at least LENGTH - STRIDE tokens before it where the document has them.
    """
    ids = torch.tensor([0, *tokenizer.encode(document).ids])
    start, scored = 0, 0
    while scored < len(ids) - 1:
        end = min(start + LENGTH, len(ids) - 1)
        yield ids[None, start : end + 1], scored - start
        scored = end
        start += STRIDE


@torch.no_grad()
def bits_per_byte(logits: Callable[[Tensor], Tensor], documents: list[str], tokenizer: Path) -> float:
    """Total code length of the documents, end of text in front of each, over their UTF-8 bytes."""
    encode, nats, size = Tokenizer.from_file(str(tokenizer)), 0.0, 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for document in documents:
        size += len(document.encode())
        for ids, first in windows(document, encode):
            out = logits(ids[:, :-1].to(device))[0, first:].float()
            nats += F.cross_entropy(out, ids[0, first + 1 :].to(device), reduction="sum").item()
    return nats / math.log(2) / size


@torch.no_grad()
def head_agreement(model: Model, documents: list[str], tokenizer: Path) -> list[float]:
    """Share of rows whose step-j draft equals the trunk's own greedy token, the text's tokens fed, j = 1 .. 3."""
    encode, hits, rows = Tokenizer.from_file(str(tokenizer)), torch.zeros(3), torch.zeros(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for document in documents:
        ids = torch.tensor([0, *encode.encode(document).ids], device=device)
        for start in range(0, len(ids) - 128, LENGTH):
            # Whole multiples of 128 rows: one shape for the sparse attention kernel.
            window = ids[None, start : start + LENGTH]
            length = window.shape[1] // 128 * 128 if window.shape[1] < LENGTH else LENGTH
            window = window[:, :length]
            hidden = model.model(window)
            greedy = model.logits(hidden).argmax(-1)
            embeddings = [model.model.embed_tokens(F.pad(window[:, j:], (0, j))) for j in (1, 2, 3)]
            for j, y in enumerate(model.mtp(hidden, embeddings), 1):
                same = model.logits(y[:, : length - j]).argmax(-1) == greedy[:, j:]
                hits[j - 1] += same.sum().item()
                rows[j - 1] += same.numel()
    return (hits / rows).tolist()
