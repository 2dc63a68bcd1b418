"""One engine step as the layers see it: which requests verify, where their rows lie, and what happens to kept rows.

Made once a step and shared by all layers. Captured graphs read the same buffers at every replay, so what varies is
written into them; what is a bound (requests, rows) is a slice.
"""

from typing import NamedTuple

import numpy as np
import torch

from treewy.ops import gdn
from treewy.ops import tree as trees
from treewy.packed import PathTables, TreeTables
from treewy.shapes import Int, Tensor
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

    Attributes:
        drafted: The requests that the running step verifies.
        keeps: Per request, whether it may keep rows. How many, only the device knows.
        tables: Of the running step; None between steps.
        accepted: Per request, the rows that it accepted in its last step; 1 before its first.
        num_accepted: The same for each request of the engine's batch, where vLLM's own counts cannot be had.
    """

    def __init__(self, memory: Memory, backend: str | None = None) -> None:
        """Make the buffers that captured graphs read."""
        self.memory, self.backend = memory, backend
        sizes, device = memory.sizes, memory.lengths.device
        seqs, options = sizes.num_requests, {"dtype": torch.int32, "device": device}
        self._places, self._fold = torch.full((seqs,), -1, **options), torch.zeros(seqs, **options)
        self._none, self._largest = torch.zeros(seqs, **options), torch.full((seqs,), sizes.max_path, **options)
        self._along = torch.arange(sizes.max_path, **options)
        # Chains that are all full are the common case: their rows' tables are written once and stay.
        self._buffers = trees.empty(seqs, sizes.num_step_rows, sizes.step_rows, device)
        self._starts = torch.arange(seqs + 1, **options) * sizes.step_rows
        self._holds_full_chains = False
        self.drafted = Drafted(*(np.zeros(0, np.int32),) * 3)
        self.keeps = np.zeros(seqs, bool)
        self.accepted: Int[Tensor, "R"] = torch.ones(seqs, **options)
        self.num_accepted: Int[Tensor, "X"] | None = None
        self.tables: Tables | None = None

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What is written once and read ever after: whoever takes the worker's memory away has to bring these back."""
        of_trees = self._buffers._asdict()
        del of_trees["max_rows"]
        constants = {"none": self._none, "largest": self._largest, "along": self._along, "starts": self._starts}
        return {"lengths": self.memory.lengths, "accepted": self.accepted} | constants | of_trees

    def begin(self, drafted: Drafted, num_seqs: int, num_rows: int) -> None:
        """Write the tables of a step.

        Args:
            drafted: The requests whose rows are verified.
            num_seqs: Sequences to make tables for: theirs, or more where a captured graph has more (they are inert).
            num_rows: Rows likewise.
        """
        self.drafted, count = drafted, len(drafted.requests)
        places, fold = self._places[:num_seqs], self._fold[:num_seqs]
        places[count:] = -1
        places[:count] = _to_device(drafted.requests, places.device)
        capacity, largest = self.memory.sizes.kept_rows, self._largest[:num_seqs]
        gdn.choose_folds(self.memory.lengths, places, largest, capacity, out=fold, backend=self.backend)
        self.tables = Tables(places, fold, self._tree(drafted.sizes, num_seqs, num_rows))

    def finish(self, num_sampled: Int[Tensor, "X"]) -> None:
        """Keep the rows that were accepted: the root of each tree and its accepted drafts.

        Args:
            num_sampled: Tokens that each request of the engine's batch gained: its accepted drafts and one more. A request
                that sampled none, because more of its prompt is to come, keeps its root: that token is of the prompt.
        """
        tables, memory = self.tables, self.memory
        if tables is None or not (self.drafted.requests >= 0).any():  # nobody, or dummies
            return
        count = len(self.drafted.requests)
        places, fold = tables.places[:count], tables.fold[:count]
        if count < len(num_sampled):
            num_sampled = num_sampled[_to_device(self.drafted.batch, num_sampled.device).long()]
        starts = tables.tree.cu_rows[:count]
        path = PathTables(starts[:, None] + self._along, num_sampled[:count].clamp(min=1).to(torch.int32))
        gdn.settle(memory.lengths, places, self._none[:count], fold, backend=self.backend)
        gdn.append_layers(memory.kept, places, memory.step, path, backend=self.backend)
        gdn.settle(memory.lengths, places, path.lengths, self._none[:count], backend=self.backend)
        self.accepted[places.long()] = path.lengths
        self.keeps[self.drafted.requests] = True
        self.tables = None

    def forget(self, request: int) -> None:
        """Drop what a request keeps: another one has its index now, it begins again, or its page has it all."""
        if self.keeps[request]:
            self.memory.lengths[request].fill_(0)
            self.accepted[request].fill_(1)
            self.keeps[request] = False

    def _tree(self, sizes: Int[np.ndarray, "B"], num_seqs: int, num_rows: int) -> TreeTables:
        buffers, max_rows = self._buffers, self._buffers.max_rows
        rows = buffers._replace(
            parents=buffers.parents[:num_rows],
            cu_rows=buffers.cu_rows[: num_seqs + 1],
            seq_of_row=buffers.seq_of_row[:num_rows],
            depth=buffers.depth[:num_rows],
            ancestors=buffers.ancestors[:num_rows],
        )
        if (sizes == max_rows).all():
            if not self._holds_full_chains:
                self._fill_with_full_chains()
            torch.clamp(self._starts[: num_seqs + 1], max=max_rows * len(sizes), out=rows.cu_rows)
            return rows
        self._holds_full_chains = False
        ends = np.concatenate([np.cumsum(sizes), np.full(num_seqs - len(sizes), sizes.sum())])
        starts = np.concatenate([[0], ends])
        chains = np.full(num_rows, -1, np.int32)
        chains[: starts[-1]] = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts)) - 1
        device = self._buffers.device
        return trees.tables(
            _to_device(chains, device), _to_device(starts, device), max_rows=max_rows, out=rows, backend=self.backend
        )

    def _fill_with_full_chains(self) -> None:
        buffers = self._buffers
        starts = torch.clamp(self._starts, max=buffers.num_rows)
        parents = torch.arange(buffers.num_rows, device=buffers.device) % buffers.max_rows - 1
        trees.tables(parents.to(torch.int32), starts, max_rows=buffers.max_rows, out=buffers, backend=self.backend)
        self._holds_full_chains = True


def _to_device(table: np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(table, dtype=np.int32)).to(device, non_blocking=True)
