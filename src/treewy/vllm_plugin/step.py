"""One engine step as the layers see it: which requests verify, where their rows lie, and what happens to kept rows.

Made once a step and shared by all layers. Captured graphs read the same buffers at every replay, so what varies is
written into them; what is a bound (requests, rows) is a slice.
"""

from typing import NamedTuple

import numpy as np
import torch

from treewy.errors import UnsupportedError
from treewy.ops import gdn
from treewy.ops import tree as trees
from treewy.packed import PathTables, TreeTables
from treewy.shapes import Int, Tensor
from treewy.tree import DraftTree
from treewy.vllm_plugin.counts import Counts
from treewy.vllm_plugin.memory import Memory


class Drafted(NamedTuple):
    """The requests of a step whose rows are a draft tree, as the host knows them.

    Attributes:
        batch: Their places in the engine's batch, ascending.
        requests: The engine's index of each, which stays a request's own as long as it runs.
        sizes: Rows of each: the root and what it drafted.
    """

    batch: Int[np.ndarray, "B"]
    requests: Int[np.ndarray, "B"]
    sizes: Int[np.ndarray, "B"]

    @property
    def num_rows(self) -> int:
        """Rows of all of them."""
        return int(self.sizes.sum())

    def check_captured(self, num_requests: int) -> None:
        """Check that these are all requests of a step whose captured graph is replayed.

        Raises:
            UnsupportedError: some request of the step is none of them.
        """
        others = num_requests - len(self.requests)
        if others:
            raise UnsupportedError(
                f"A captured step must be of requests that verify; {others} of {num_requests} do not, and the graph would read "
                "tables of an earlier step. Pass --enforce-eager, and report this: vLLM is not expected to ask for it."
            )


def dummies(sizes: Int[np.ndarray, "B"], step_rows: int) -> Drafted:
    """Return a dummy batch: rows for the kernels to run on, of requests that keep nothing.

    One with more rows than a draft has stands for prompts, as many as a step may have: it takes vLLM's own path.
    """
    sizes = np.asarray(sizes, dtype=np.int32)
    if (sizes > step_rows).any():
        sizes = sizes[:0]
    return Drafted(np.arange(len(sizes)), np.full(len(sizes), -1, np.int32), sizes)


class Tables(NamedTuple):
    """What a layer needs of the step, on the device.

    Attributes:
        places: Request of each sequence, where its kept rows lie; -1 is inert.
        fold: Per sequence: whether its kept rows go into the state now.
        tree: The trees.
    """

    places: Int[Tensor, "B"]
    fold: Int[Tensor, "B"]
    tree: TreeTables


class Step:
    """The running step: its tables before the forward, and the rows to keep after sampling.

    Args:
        memory: What it moves rows in.
        backend: Backend of the ops that it calls.
        tree: What a request drafts, a chain by default. Of fewer rows than it has they are its first, a tree as well.

    Attributes:
        drafted: The requests that the running step verifies.
        keeps: Per request, whether it may keep rows. How many, only the device knows.
        tables: Of the running step; None between steps.
        tracks: Whether `accepted` is written: for a runner that does not know how many rows a request accepted.
        accepted: Per request, the rows that it accepted in its last step; 1 before its first.
        num_accepted: The same for each request of the engine's batch, where vLLM's own counts cannot be had.
        counts: What was counted of all steps.
    """

    def __init__(self, memory: Memory, backend: str | None = None, tree: DraftTree | None = None) -> None:
        """Make the buffers that captured graphs read."""
        self.memory, self.backend = memory, backend
        self.tree = DraftTree.chain(memory.sizes.step_rows - 1) if tree is None else tree
        self._parents = np.asarray(self.tree.parents, dtype=np.int32)
        sizes, device = memory.sizes, memory.lengths.device
        seqs, options = sizes.num_requests, {"dtype": torch.int32, "device": device}
        self._places, self._fold = torch.full((seqs,), -1, **options), torch.zeros(seqs, **options)
        self._none, self._largest = torch.zeros(seqs, **options), torch.full((seqs,), sizes.max_path, **options)
        self._along = torch.arange(sizes.max_path, **options)
        # Trees that are all full are the common case: their rows' tables are written once and stay.
        self._buffers = trees.empty(seqs, sizes.num_step_rows, sizes.step_rows, device)
        self._starts = torch.arange(seqs + 1, **options) * sizes.step_rows
        self._holds_full_trees = False
        self.drafted = Drafted(*(np.zeros(0, np.int32),) * 3)
        self.keeps = np.zeros(seqs, bool)
        self.tracks = True
        self.accepted: Int[Tensor, "R"] = torch.ones(seqs, **options)
        self.num_accepted: Int[Tensor, "X"] | None = None
        self.tables: Tables | None = None
        self.counts, self._full_graph = Counts(sizes, device), False
        self._accepted, self._shares = torch.ones(seqs, **options), False

    @property
    def requests(self) -> Int[Tensor, "R"]:
        """The engine's index of each request that verifies, on the device; -1 behind them."""
        return self._places

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What is written once and read ever after: whoever takes the worker's memory away has to bring these back."""
        of_trees = self._buffers._asdict()
        del of_trees["max_rows"]
        constants = {"none": self._none, "largest": self._largest, "along": self._along, "starts": self._starts}
        return {"lengths": self.memory.lengths, "accepted": self.accepted} | constants | of_trees | self.counts.lasting

    def begin(
        self,
        drafted: Drafted,
        num_seqs: int,
        num_rows: int,
        *,
        full_graph: bool = False,
        requests: Int[Tensor, "X"] | None = None,
    ) -> None:
        """Write the tables of a step.

        Args:
            drafted: The requests whose rows are verified.
            num_seqs: Sequences to make tables for: theirs, or more where a captured graph has more (they are inert).
            num_rows: Rows likewise.
            full_graph: Whether the step replays a captured graph of whole steps.
            requests: `drafted.requests` where they lie on the device already.
        """
        self.drafted, self._full_graph, count = drafted, full_graph, len(drafted.requests)
        self._shares = False
        places, fold = self._places[:num_seqs], self._fold[:num_seqs]
        places[:count] = _to_device(drafted.requests, places.device) if requests is None else requests[:count]
        if count < num_seqs:
            places[count:] = -1
        capacity, largest = self.memory.sizes.kept_rows, self._largest[:num_seqs]
        gdn.choose_folds(self.memory.lengths, places, largest, capacity, out=fold, backend=self.backend)
        self.tables = Tables(places, fold, self._tree(drafted.sizes, num_seqs, num_rows))

    def share_accepted(self, num_accepted: Int[Tensor, "X"], num_seqs: int) -> Int[Tensor, "B"]:
        """Return how many rows each sequence accepted in its last step, in a buffer that is written once per step.

        Args:
            num_accepted: The same, of a whole batch of requests that verify; entries behind them do not matter.
            num_seqs: Sequences of the step's tables.
        """
        count, shared = len(self.drafted.requests), self._accepted[:num_seqs]
        if not self._shares:
            shared[:count].copy_(num_accepted[:count])
            if count < num_seqs:
                shared[count:].fill_(1)
            self._shares = True
        return shared

    def finish(self, num_sampled: Int[Tensor, "X"], path: Int[Tensor, "X P"] | None = None) -> PathTables | None:
        """Keep the rows that were accepted: the root of each tree and its accepted drafts.

        Args:
            num_sampled: Tokens that each request of the engine's batch gained: its accepted drafts and one more. A request
                that sampled none, because more of its prompt is to come, keeps its root: that token is of the prompt.
            path: Rows of each request's accepted path, local to its tree, the root first; the first ones by default.

        Returns:
            The paths of the requests that verified, in the step's packed rows; None if no request did.
        """
        tables, memory = self.tables, self.memory
        if tables is None or not (self.drafted.requests >= 0).any():  # nobody, or dummies
            return None
        count = len(self.drafted.requests)
        places, fold = tables.places[:count], tables.fold[:count]
        if count < len(num_sampled):
            chosen = _to_device(self.drafted.batch, num_sampled.device).long()
            num_sampled, path = num_sampled[chosen], None if path is None else path[chosen]
        starts = tables.tree.cu_rows[:count]
        along = self._along if path is None else path[:count]
        path_tables = PathTables(starts[:, None] + along, num_sampled[:count].clamp(min=1).to(torch.int32))
        gdn.settle(memory.lengths, places, self._none[:count], fold, backend=self.backend)
        gdn.append_layers(memory.kept, places, memory.step, path_tables, backend=self.backend)
        gdn.settle(memory.lengths, places, path_tables.lengths, self._none[:count], backend=self.backend)
        if self.tracks:
            self.accepted[places.long()] = path_tables.lengths
        self.keeps[self.drafted.requests] = True
        self.tables = None
        self.counts.observe(self.drafted.sizes, num_sampled[:count], fold, full_graph=self._full_graph)
        return path_tables

    def forget(self, request: int) -> None:
        """Drop what a request keeps: another one has its index now, it begins again, or its page has it all."""
        if self.keeps[request]:
            self.memory.lengths[request].fill_(0)
            self.accepted[request].fill_(1)
            self.keeps[request] = False

    def _tree(self, sizes: Int[np.ndarray, "B"], num_seqs: int, num_rows: int) -> TreeTables:
        buffers, max_rows = self._buffers, self._buffers.max_rows
        rows = buffers.first(num_seqs, num_rows)
        if (sizes == max_rows).all():
            if not self._holds_full_trees:
                self._fill_with_full_trees()
            torch.clamp(self._starts[: num_seqs + 1], max=max_rows * len(sizes), out=rows.cu_rows)
            return rows
        self._holds_full_trees = False
        ends = np.concatenate([np.cumsum(sizes), np.full(num_seqs - len(sizes), sizes.sum())])
        starts = np.concatenate([[0], ends])
        parents = np.full(num_rows, -1, np.int32)
        parents[: starts[-1]] = self._parents[np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))]
        device = self._buffers.device
        return trees.tables(
            _to_device(parents, device), _to_device(starts, device), max_rows=max_rows, out=rows, backend=self.backend
        )

    def _fill_with_full_trees(self) -> None:
        buffers = self._buffers
        starts = torch.clamp(self._starts, max=buffers.num_rows)
        whole = -(-buffers.num_rows // buffers.max_rows)
        parents = _to_device(np.tile(self._parents, whole)[: buffers.num_rows], buffers.device)
        trees.tables(parents, starts, max_rows=buffers.max_rows, out=buffers, backend=self.backend)
        self._holds_full_trees = True


def _to_device(table: np.ndarray, device: torch.device) -> Tensor:
    return sent(np.ascontiguousarray(table, dtype=np.int32), device)


def sent(table: np.ndarray, device: torch.device) -> Tensor:
    """Copy a table to the device without waiting for it: the driver stages what is not pinned before the call returns."""
    return torch.from_numpy(table).to(device, non_blocking=True)
