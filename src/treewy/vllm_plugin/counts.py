"""What a worker counts of its steps, and the line of its log that says so.

Counting asks the device nothing: two additions on it per step, outside of captured graphs, and a few on the host. For the
log, counts are copied without waiting, once an interval, and written by the first step that finds the copy done.
"""

import logging
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from treewy.shapes import Int, Tensor
from treewy.vllm_plugin.memory import Sizes

# Below vLLM's own logger, whose handlers and format it takes.
logger = logging.getLogger("vllm.treewy")
# Where vLLM reads how often its own statistics are logged, in seconds, and what it takes in place of nonsense.
INTERVAL, DEFAULT_INTERVAL = "VLLM_LOG_STATS_INTERVAL", 10.0


class Numbers(NamedTuple):
    """What was counted.

    Attributes:
        num_steps: Steps in which some request verified.
        num_full_graph_steps: Those of them that replayed a whole step's captured graph.
        num_draft_tokens: Drafts that were verified.
        num_undrafted: How often a request verified without drafts, or sampled nothing because more of its prompt was to come.
        accept_lengths: How often a request's drafts gained it 1, 2, ... tokens in a step: those accepted, and one.
        num_folds: Histories that went into their states.
    """

    num_steps: int
    num_full_graph_steps: int
    num_draft_tokens: int
    num_undrafted: int
    accept_lengths: tuple[int, ...]
    num_folds: int

    @property
    def num_drafts(self) -> int:
        """Return how often a request's drafts were verified."""
        return sum(self.accept_lengths)

    @property
    def num_accepted_tokens(self) -> int:
        """Return how many drafts were accepted."""
        return sum(drafts * count for drafts, count in enumerate(self.accept_lengths))

    @property
    def accepted_at_least(self) -> tuple[int, ...]:
        """Return how often at least 1, 2, ... drafts were accepted: of each depth, how many."""
        return tuple(sum(self.accept_lengths[depth:]) for depth in range(1, len(self.accept_lengths)))

    def since(self, earlier: "Numbers") -> "Numbers":
        """Return what was counted after `earlier`."""
        lengths = tuple(now - then for now, then in zip(self.accept_lengths, earlier.accept_lengths, strict=True))
        return Numbers(
            self.num_steps - earlier.num_steps,
            self.num_full_graph_steps - earlier.num_full_graph_steps,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_undrafted - earlier.num_undrafted,
            lengths,
            self.num_folds - earlier.num_folds,
        )


class _Copy(NamedTuple):
    """Counts of the device on their way to the host, and the host's own of the same moment."""

    on_host: tuple[int, int, int]
    on_device: Int[Tensor, "X"]
    done: torch.cuda.Event | None

    def numbers(self) -> Numbers:
        """Return the numbers; the copy must be done."""
        undrafted, *lengths, folds = self.on_device.tolist()
        return Numbers(*self.on_host, undrafted, tuple(lengths), folds)


class Counts:
    """Counts the steps of a worker.

    Args:
        sizes: Of its engine's memory.
        device: Where steps run.

    Attributes:
        logs: Whether this worker writes the line; of several that count the same, one does.
        interval: Seconds between two lines.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Start at nothing."""
        options = {"dtype": torch.int64, "device": device}
        self._lengths = torch.zeros(1 + sizes.max_path, **options)
        # By place in the batch: to sum them up in every step would be one more launch.
        self._folds = torch.zeros(sizes.num_requests, **options)
        self._ones = torch.ones(sizes.num_requests, **options)
        self._on_host = (0, 0, 0)
        self.logs, self.interval = True, interval_of(os.environ.get(INTERVAL))
        self._said = Numbers(0, 0, 0, 0, (0,) * sizes.max_path, 0)
        self._copy: _Copy | None = None
        self._last: float | None = None

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What must outlast a worker whose memory is taken away; see `Step.lasting`."""
        return {"counted_lengths": self._lengths, "counted_folds": self._folds, "ones": self._ones}

    def observe(
        self, num_rows: Int[np.ndarray, "B"], gained: Int[Tensor, "B"], fold: Int[Tensor, "B"], *, full_graph: bool
    ) -> None:
        """Count a step of requests, after it.

        Args:
            num_rows: Rows of each request that verified: the root and its drafts.
            gained: Tokens that each gained, 0 where it sampled none.
            fold: Whether its history went into its state.
            full_graph: Whether a whole step's captured graph was replayed.
        """
        count, drafted = len(num_rows), num_rows > 1
        if not drafted.all():
            gained = gained * torch.from_numpy(drafted).to(gained.device, non_blocking=True)
        self._lengths.index_add_(0, gained, self._ones[:count])
        self._folds[:count] += fold
        steps, graphs, drafts = self._on_host
        self._on_host = (steps + 1, graphs + full_graph, drafts + int(num_rows.sum()) - count)
        if self.logs:
            self._log(time.monotonic())

    def read(self) -> Numbers:
        """Return the numbers since the worker began, waiting for the device."""
        return _Copy(self._on_host, self._gather().cpu(), None).numbers()

    def _gather(self) -> Int[Tensor, "X"]:
        return torch.cat([self._lengths, self._folds.sum()[None]])

    def _log(self, now: float) -> None:
        """Begin to copy where it is time to, and log what has arrived."""
        if self._last is None:
            self._last = now
        if self._copy is None and now - self._last >= self.interval:
            self._copy, self._last = self._begin_copy(), now
        if self._copy is not None and (self._copy.done is None or self._copy.done.query()):
            numbers, self._copy = self._copy.numbers(), None
            logger.info(log_line(numbers.since(self._said)))
            self._said = numbers

    def _begin_copy(self) -> _Copy:
        # From a GPU this goes to pinned memory, and the host does not wait for it.
        on_device, done = self._gather().to("cpu", non_blocking=True), None
        if self._lengths.is_cuda:
            done = torch.cuda.Event()
            done.record()
        return _Copy(self._on_host, on_device, done)


def interval_of(given: str | None) -> float:
    """Return the seconds between two lines of the log, from vLLM's variable and as vLLM reads it."""
    seconds = DEFAULT_INTERVAL if given is None else float(given)
    return seconds if seconds > 0 else DEFAULT_INTERVAL


def log_line(numbers: Numbers) -> str:
    """Return what happened in an interval as a line of the log."""
    gained = "nothing was drafted"
    if numbers.num_drafts:
        mean = 1 + numbers.num_accepted_tokens / numbers.num_drafts
        rates = " ".join(f"{count / numbers.num_drafts:.2f}" for count in numbers.accepted_at_least)
        gained = f"{numbers.num_drafts:,} drafts gained {mean:.2f} tokens each, accepted by depth {rates}"
    return (
        f"treewy: {numbers.num_steps:,} steps, {numbers.num_full_graph_steps:,} of them as full graphs; {gained}; "
        f"{numbers.num_folds:,} histories folded"
    )
