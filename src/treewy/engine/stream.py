"""From tokens to text, piece by piece: characters split over tokens, and stop strings."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable


class TokenKind(Enum):
    """Where a token came from."""

    PREFILL = "prefill"  # sampled from the prompt's last row
    ACCEPTED = "accepted"  # a draft that stood
    RECOVERED = "recovered"  # the target's own, where drafts fell
    BONUS = "bonus"  # the target's own, after a leaf
    PLAIN = "plain"  # decoded without drafts


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token, under the model's own law.

    Attributes:
        logprob: Of the token.
        top: Of the most likely tokens, best first.
    """

    logprob: float
    top: dict[int, float]


class StreamEvent(NamedTuple):
    """New tokens of one request.

    Attributes:
        index: The request's place in the call, or in a session the number that `add` returned.
        token_ids: New tokens.
        kinds: Kind of each.
        pieces: Text each token released. A token may release none: a character may still be incomplete, or a stop
            string may have begun.
        finish_reason: Set with the last event of a request.
        logprobs: Of each token, if asked for.
    """

    index: int
    token_ids: list[int]
    kinds: list[TokenKind]
    pieces: list[str]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprobs] = ()


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of `token_ids`."""
        ...


# What byte-level tokenizers decode an incomplete character to.
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one request as its tokens arrive; ends at the first stop string.

    Args:
        tokenizer: None keeps the text empty.
        stop: Strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._pending_from = 0  # first token whose text is not in `_decoded` for good
        self._context_from = 0  # tokens decoded along for context, as some tokenizers strip leading spaces
        self._decoded = ""
        self._released = 0

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        if self.tokenizer is None or self.stopped:
            return ""
        self._ids.append(token)
        context = self._decode(self._context_from, self._pending_from)
        both = self._decode(self._context_from, len(self._ids))
        if both.endswith(REPLACEMENT) or len(both) <= len(context):
            return ""
        self._decoded += both[len(context) :]
        self._context_from, self._pending_from = self._pending_from, len(self._ids)
        return self._release(len(self._decoded) - self._held_back())

    def flush(self) -> str:
        """Return what was held back, at the end of a request that met no stop string."""
        if self.tokenizer is None or self.stopped:
            return ""
        context = self._decode(self._context_from, self._pending_from)
        self._decoded += self._decode(self._context_from, len(self._ids))[len(context) :]
        self._context_from = self._pending_from = len(self._ids)
        return self._release(len(self._decoded))

    def _decode(self, start: int, end: int) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self._ids[start:end], skip_special_tokens=True)

    def _release(self, end: int) -> str:
        starts = [at for at in (self._decoded.find(stop, self._search_from(stop)) for stop in self.stop) if at >= 0]
        if starts:
            self.stopped, end = True, min(starts)
        piece = self._decoded[self._released : end]
        self._released = max(end, self._released)
        self.text = self._decoded[: self._released]
        return piece

    def _search_from(self, stop: str) -> int:
        return max(0, self._released - len(stop) + 1)

    def _held_back(self) -> int:
        """Return how many characters at the end might begin a stop string."""
        longest = 0
        for stop in self.stop:
            for size in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = size
                    break
        return longest
