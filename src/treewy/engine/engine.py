"""Engine: requests in, tokens out."""

from collections.abc import Iterator, Sequence
from operator import index
from time import perf_counter

import torch

from treewy.cache import CachePool, get_policy
from treewy.draft import Drafter, Shape
from treewy.draft.shape import in_level_order, most_children
from treewy.engine.request import Generation, Request, SamplingParams, finished
from treewy.engine.scheduler import Scheduler
from treewy.engine.step import Machine, prefill, speculate
from treewy.engine.stream import Detokenizer, StreamEvent, Tokenizer
from treewy.errors import CapacityError, RequestError
from treewy.model import Target
from treewy.tree import MAX_ROWS

Prompt = str | Sequence[int]


class Engine:
    """Decodes batches of requests on one target, speculating with one drafter.

    Args:
        target: The model.
        drafter: Proposes trees; made for at least `max_num_seqs` slots.
        shape: Draft shape, or budget, of requests that bring none of their own.
        commit: Commit policy: "store_all" or "reconstruct".
        tokenizer: Needed for text prompts, text results and stop strings.
        eos_ids: Tokens that end a text.
        max_num_seqs: Requests decoded at once; more wait.
        prefill_chunk: Prompt tokens per request and step.
        poison: Fill free memory with NaN (see `CachePool`).
    """

    # Memory made in inference mode could not be written outside it: an engine works in and out of the caller's.
    @torch.inference_mode(False)
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        shape: Shape,
        commit: str = "reconstruct",
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        max_num_seqs: int = 8,
        prefill_chunk: int = 64,
        poison: bool = False,
    ) -> None:
        self.target, self.drafter, self.shape, self.tokenizer = target, drafter, shape, tokenizer
        if not 1 <= prefill_chunk <= MAX_ROWS:
            raise RequestError(f"prefill_chunk must lie in 1..{MAX_ROWS}; got {prefill_chunk}. 64 is a good default.")
        self.cache = CachePool(
            target.layer_specs(),
            max_num_seqs,
            get_policy(commit),
            dtype=target.dtype,
            state_dtype=target.state_dtype,
            device=target.device,
            max_len=target.max_len,
            poison=poison,
        )
        self._machine = Machine(target, drafter, self.cache, frozenset(eos_ids))
        self._prefill_chunk = prefill_chunk

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Generation]:
        """Decode every prompt; results in the prompts' order.

        Args:
            prompts: Texts or lists of token ids.
            params: One for all, or one per prompt.

        Raises:
            RequestError: a prompt is empty or too long; nothing has run then.
        """
        requests = self._requests(prompts, params)
        for _ in self._run(requests):
            pass
        return [finished(request) for request in requests]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Iterator[StreamEvent]:
        """Decode every prompt, yielding tokens as steps deliver them. Arguments and errors as in `generate`.

        The iterator's value, when it ends, is the list that `generate` returns. Closing it early ends its requests.
        """
        # Checked here, not at the first next(): a bad prompt should fail where it was passed.
        return self._stream(self._requests(prompts, params))

    def _stream(self, requests: list[Request]) -> Iterator[StreamEvent]:
        yield from self._run(requests)
        return [finished(request) for request in requests]

    def _run(self, requests: list[Request]) -> Iterator[StreamEvent]:
        scheduler = Scheduler(self.cache, self.drafter)
        for request in requests:
            # Not at the call: a stream may be opened long before it is read.
            request.stats.started = perf_counter()
            scheduler.add(request)
        try:
            while not scheduler.is_idle:
                yield from self._step(scheduler)
        finally:
            # Reached early only by an error or a closed stream: what still runs is lost, its memory is not.
            for request in requests:
                scheduler.release(request)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self, scheduler: Scheduler) -> list[StreamEvent]:
        scheduler.admit()
        if not scheduler.running:
            raise CapacityError(
                f"A waiting request needs a slot; all {self.cache.num_slots} are held by other streams of this engine. "
                "Finish or close one, or raise max_num_seqs."
            )
        events: list[StreamEvent] = []
        if prefilling := scheduler.prefilling():
            events += prefill(self._machine, prefilling, self._prefill_chunk)
            _release_finished(scheduler)
        if decoding := scheduler.decoding():
            events += speculate(self._machine, decoding)
            _release_finished(scheduler)
        return events

    def _requests(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list; got one string. Wrap it: [prompt].")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(
                f"There must be one params per prompt; got {len(each)} for {len(prompts)}. Or pass just one."
            )
        return [self._request(place, prompt, p) for place, (prompt, p) in enumerate(zip(prompts, each, strict=True))]

    def _request(self, place: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self._encode(prompt) if isinstance(prompt, str) else _token_ids(prompt, place)
        limit = self.target.max_len
        if not ids:
            raise RequestError(f"A prompt must hold at least one token; prompt {place} is empty. Give it some text.")
        if len(ids) >= limit:
            raise RequestError(
                f"A prompt and one new token must fit the context of {limit} tokens; prompt {place} has {len(ids)}. "
                "Shorten it."
            )
        bad = next((token for token in ids if not 0 <= token < self.target.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"Token ids must lie in 0..{self.target.vocab_size - 1}; prompt {place} holds {bad}. "
                "Use the model's own tokenizer."
            )
        shape = in_level_order(params.shape or self.shape)
        widest = most_children(shape)
        if widest > self.target.vocab_size:
            raise RequestError(
                f"A row can have at most as many children as there are tokens, {self.target.vocab_size}; the shape of prompt "
                f"{place} has {widest}. Draft a narrower tree."
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer; this engine has none. Pass tokenizer=, or drop stop.")
        return Request(
            id=place,
            prompt=ids,
            params=params,
            shape=shape,
            max_new_tokens=min(params.max_new_tokens, limit - len(ids)),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
        )

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer; this engine has none. Pass token ids, or tokenizer=.")
        return list(self.tokenizer.encode(text))


def _token_ids(prompt: Sequence[int], place: int) -> list[int]:
    try:
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError("a bool is no token id")
        return [index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(
            f"A prompt must be a text or a list of token ids; prompt {place} is {prompt!r:.60}. Wrap a single prompt in a list."
        ) from error


def _release_finished(scheduler: Scheduler) -> None:
    for request in [request for request in scheduler.running if request.finish_reason]:
        scheduler.release(request)
