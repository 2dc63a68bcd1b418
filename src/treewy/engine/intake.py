"""From a prompt and its parameters to a request, or to an error before anything has run."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import NamedTuple

from treewy.draft import Shape
from treewy.draft.shape import in_level_order, most_children
from treewy.engine.request import Request, SamplingParams
from treewy.engine.stream import Detokenizer, Tokenizer
from treewy.errors import RequestError
from treewy.model import Target

Prompt = str | Sequence[int]


class Intake(NamedTuple):
    """What requests are checked against.

    Attributes:
        target: The model.
        tokenizer: None takes token ids only.
        shape: Draft shape, or budget, of requests that bring none of their own.
    """

    target: Target
    tokenizer: Tokenizer | None
    shape: Shape

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """Return a request per prompt, numbered in order.

        Args:
            prompts: Texts or lists of token ids.
            params: One for all, or one per prompt.

        Raises:
            RequestError: a prompt is empty, too long or not text nor tokens of this model; params are no `SamplingParams`, or not
                one per prompt.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list; got one string. Wrap it: [prompt].")
        each = list(params) if isinstance(params, Iterable) else [params] * len(prompts)
        if not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError(
                f"params must be a SamplingParams, or one per prompt; got {params!r:.80}. Write "
                "SamplingParams(max_new_tokens=3), say."
            )
        if len(each) != len(prompts):
            raise RequestError(
                f"There must be one params per prompt; got {len(each)} for {len(prompts)}. Or pass just one."
            )
        return [self.request(place, prompt, p) for place, (prompt, p) in enumerate(zip(prompts, each, strict=True))]

    def request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        """Return one request; errors as in `requests`."""
        ids = self._encode(prompt) if isinstance(prompt, str) else _token_ids(prompt, number)
        limit = self.target.max_len
        if not ids:
            raise RequestError(f"A prompt must hold at least one token; prompt {number} is empty. Give it some text.")
        if len(ids) >= limit:
            raise RequestError(
                f"A prompt and one new token must fit the context of {limit} tokens; prompt {number} has {len(ids)}. "
                "Shorten it."
            )
        bad = next((token for token in ids if not 0 <= token < self.target.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"Token ids must lie in 0..{self.target.vocab_size - 1}; prompt {number} holds {bad}. "
                "Use the model's own tokenizer."
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer; this engine has none. Pass tokenizer=, or drop stop.")
        return Request(
            id=number,
            prompt=ids,
            params=params,
            shape=self._shape(number, params),
            max_new_tokens=min(params.max_new_tokens, limit - len(ids)),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
        )

    def _shape(self, number: int, params: SamplingParams) -> Shape:
        shape = in_level_order(params.shape or self.shape)
        widest = most_children(shape)
        if widest > self.target.vocab_size:
            raise RequestError(
                f"A row can have at most as many children as there are tokens, {self.target.vocab_size}; the shape of "
                f"prompt {number} has {widest}. Draft a narrower tree."
            )
        return shape

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer; this engine has none. Pass token ids, or tokenizer=.")
        return list(self.tokenizer.encode(text))


def _token_ids(prompt: Sequence[int], number: int) -> list[int]:
    try:
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError("a bool is no token id")
        return [index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(
            f"A prompt must be a text or a list of token ids; prompt {number} is {prompt!r:.60}. "
            "Wrap a single prompt in a list."
        ) from error
