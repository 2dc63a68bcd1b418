"""A target that says exactly what it is told, and small tokenizers to read it with."""

from collections.abc import Sequence

import torch

from treewy.cache import Batch, CachePool, LayerSpec
from treewy.model import Target, Verified


class ScriptTarget(Target):
    """Follows one script by position, whatever tokens it is shown; remembers nothing."""

    dtype = state_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, script: Sequence[int], *, vocab_size: int = 256, max_len: int = 4096) -> None:
        self.script, self.vocab_size, self.max_len = list(script), vocab_size, max_len

    def layer_specs(self) -> Sequence[LayerSpec]:
        return []

    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        step = cache.begin(batch.tree, batch.slots, batch.policy)
        following = [self.script[p + 1] if p + 1 < len(self.script) else 0 for p in step.positions.tolist()]
        logits = torch.nn.functional.one_hot(torch.tensor(following), self.vocab_size).float()
        asked = logits if batch.logit_rows is None else logits[batch.logit_rows]
        return Verified(asked, torch.zeros(len(following), 1), step.pending())


class PieceTokenizer:
    """One piece of text per token; decoding strips one leading space, as tokenizers of one family do."""

    def __init__(self, pieces: Sequence[str], special: Sequence[int] = ()) -> None:
        self.pieces, self.special = list(pieces), set(special)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        kept = [token for token in token_ids if not (skip_special_tokens and token in self.special)]
        return "".join(self.pieces[token] for token in kept).removeprefix(" ")


class ByteTokenizer:
    """One string of bytes per token; an incomplete character decodes to U+FFFD, as in byte-level tokenizers."""

    def __init__(self, pieces: Sequence[bytes] = tuple(bytes([byte]) for byte in range(256))) -> None:
        self.pieces = list(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(bytes([byte])) for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")
