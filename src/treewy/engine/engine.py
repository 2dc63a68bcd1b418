"""Engine: requests in, tokens out."""

from collections.abc import Iterator, Sequence

import torch

from treewy.cache import CachePool, get_policy
from treewy.draft import Drafter, Shape
from treewy.engine.intake import Intake, Prompt
from treewy.engine.request import Generation, Request, SamplingParams
from treewy.engine.session import Session
from treewy.engine.step import Machine
from treewy.engine.stream import StreamEvent, Tokenizer
from treewy.errors import RequestError
from treewy.model import Target
from treewy.tree import MAX_ROWS


class Engine:
    """Decodes batches of requests on one target, speculating with one drafter.

    Args:
        target: The model.
        drafter: Proposes trees; made for at least `max_num_seqs` slots.
        shape: Draft shape, or budget, of requests that bring none of their own.
        commit: Commit policy: "store_all", "reconstruct" or "ring".
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
        SamplingParams(shape=shape)  # checked as a request's own would be
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
        self._intake = Intake(target, tokenizer, shape)
        self._prefill_chunk = prefill_chunk

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Generation]:
        """Decode every prompt; results in the prompts' order.

        Args:
            prompts: Texts or lists of token ids.
            params: One for all, or one per prompt. A seed in the one for all is every prompt's.

        Raises:
            RequestError: a prompt is empty or too long; nothing has run then.
        """
        with self.open() as session:
            numbers = session.add_all(prompts, params)
            while not session.is_idle:
                session.step()
            return [session.result(number) for number in numbers]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Iterator[StreamEvent]:
        """Decode every prompt, yielding tokens as steps deliver them. Arguments and errors as in `generate`.

        The iterator's value, when it ends, is the list that `generate` returns. Closing it early ends its requests.
        """
        # Checked here, not at the first next(): a bad prompt should fail where it was passed.
        return self._stream(self._intake.requests(prompts, params))

    def open(self) -> Session:
        """Return a session: requests that come and go one by one."""
        return Session(self._machine, self._intake, self._prefill_chunk)

    def _stream(self, requests: Sequence[Request]) -> Iterator[StreamEvent]:
        with self.open() as session:
            numbers = session.queue(requests)
            while not session.is_idle:
                yield from session.step()
            return [session.result(number) for number in numbers]
