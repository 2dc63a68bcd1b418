"""Session: requests that join, advance together, and end or are aborted, each without touching another."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType

import torch

from treewy.engine.intake import Intake, Prompt
from treewy.engine.request import Generation, Request, SamplingParams, finished
from treewy.engine.scheduler import Scheduler
from treewy.engine.step import Machine, prefill, speculate
from treewy.engine.stream import StreamEvent
from treewy.errors import CapacityError, RequestError


class Session:
    """Requests in flight on an engine; opened by `Engine.open`. Not for several threads at once.

    Leaving it as a context manager closes it.
    """

    def __init__(self, machine: Machine, intake: Intake, prefill_chunk: int) -> None:
        self._machine, self._intake, self._chunk = machine, intake, prefill_chunk
        self._scheduler = Scheduler(machine.cache, machine.drafter)
        self._requests: dict[int, Request] = {}
        self._num_added = 0
        self._is_closed = False

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return self._scheduler.is_idle

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> int:
        """Queue a request; return its number. It joins at the next step that finds a free slot.

        Raises:
            RequestError: the prompt is empty, too long or not of this model; nothing is queued then.
        """
        request = self._intake.request(self._num_added, prompt, params)
        self.queue([request])
        return request.id

    def add_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[int]:
        """Queue one request per prompt, all or, on an error, none; return their numbers."""
        return self.queue(self._intake.requests(prompts, params))

    def queue(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that have been checked; return the numbers they get."""
        for request in requests:
            request.id = self._num_added
            self._start(request)
        return [request.id for request in requests]

    def abort(self, number: int) -> Generation:
        """End a request where it stands and free what it holds; return what it had. A finished one stays as it was."""
        request = self._request(number)
        try:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                request.detokenizer.flush()
        finally:
            self._scheduler.release(request)
        return finished(request)

    # Every small operation is a little cheaper so. What outlives a step is made outside it (`lasting`).
    @torch.inference_mode()
    def step(self) -> list[StreamEvent]:
        """Advance every running request by one step; return what each gained. Nothing runs when idle.

        A step that dies ends every request that had a slot, with what it has; those that wait can still run.

        Raises:
            CapacityError: requests wait, and other sessions of the engine hold all slots.
        """
        if self._scheduler.is_idle:
            return []
        try:
            return self._advance()
        except BaseException:
            # Tokens may be out whose rows were not committed, or rows in whose tokens are not out: no way on from there.
            self._abort_all(request.id for request in self._requests.values() if request.slot is not None)
            raise

    def result(self, number: int) -> Generation:
        """Return what a finished request generated.

        Raises:
            RequestError: there is none of that number, or it has not finished.
        """
        request = self._request(number)
        if request.finish_reason is None:
            raise RequestError(f"A request must finish before its result; request {number} has not. Go on stepping.")
        return finished(request)

    def forget(self, number: int) -> Generation:
        """Return what a finished request generated and keep nothing of it: a session may run for long.

        Errors as in `result`.
        """
        generation = self.result(number)
        del self._requests[number]
        return generation

    def close(self) -> None:
        """Abort whatever still waits or runs; its memory is not lost. Nothing can be added afterwards."""
        self._is_closed = True
        self._abort_all(self._requests)

    def _advance(self) -> list[StreamEvent]:
        scheduler, events = self._scheduler, []
        scheduler.admit()
        if not scheduler.running:
            raise CapacityError(
                f"A waiting request needs a slot; all {self._machine.cache.num_slots} are held by other streams of this "
                "engine. Finish or close one, or raise max_num_seqs."
            )
        if prefilling := scheduler.prefilling():
            events += prefill(self._machine, prefilling, self._chunk)
            self._release_finished()
        if decoding := scheduler.decoding():
            events += speculate(self._machine, decoding)
            self._release_finished()
        return events

    def _abort_all(self, numbers: Iterable[int]) -> None:
        # What one abort raises must not keep the next from giving its slot back.
        with ExitStack() as aborts:
            for number in numbers:
                aborts.callback(self.abort, number)

    def _start(self, request: Request) -> None:
        if self._is_closed:
            raise RequestError("A session must be open to take a request; this one is closed. Open another.")
        self._num_added += 1
        request.stats.started = perf_counter()
        self._requests[request.id] = request
        self._scheduler.add(request)

    def _request(self, number: int) -> Request:
        if number not in self._requests:
            raise RequestError(
                f"A request must be added before use and not be forgotten; there is no request {number} among the "
                f"{self._num_added} added. Use the number that add returned."
            )
        return self._requests[number]

    def _release_finished(self) -> None:
        for request in [request for request in self._scheduler.running if request.finish_reason]:
            self._scheduler.release(request)
