"""Drafts of trees by the model's own head, in the place of vLLM's drafter of chains.

vLLM's first pass over what was accepted stays as it is: it brings the head's cache up to date and ends at each request's
last row. From there each level is a pass over all rows of the levels above it, so that a row's keys need be nowhere but in
the pass itself. All levels are one captured graph.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.errors import UnsupportedError
from treewy.packed import WORD, TreeTables
from treewy.shapes import Int, Tensor
from treewy.tree import DraftTree
from treewy.vllm_plugin.options import WIDTHS
from treewy.vllm_plugin.state import layers_of
from treewy.vllm_plugin.tree_attention import LevelRows, shared_of
from treewy.vllm_plugin.trees import Attended

# vLLM's for places that are written nowhere.
NOWHERE = -1


class Levels:
    """Rows of a tree's upper levels, without its root, as the drafter runs them: the same for every request.

    Args:
        tree: The tree.
        num_requests: Requests that run at once (R).
        device: Of the engine.
    """

    def __init__(self, tree: DraftTree, num_requests: int, device: torch.device | str) -> None:
        """Make the tables of every level."""
        self.ends = [int(np.searchsorted(tree.depth, depth, side="right")) for depth in range(1, tree.max_depth + 1)]
        self.num_levels, self.num_requests = tree.max_depth, num_requests
        self.parents = torch.tensor(tree.parents[1:], device=device)
        self.depth = torch.from_numpy(tree.depth[1:].copy()).to(device)
        self.widths = [
            len(tree.children(0 if depth == 0 else self.ends[depth - 1] - 1)) for depth in range(self.num_levels)
        ]
        self._tables = [self._level(tree, end - 1, device) for end in self.ends[:-1]]

    @property
    def lasting(self) -> dict[str, Tensor]:
        """What is written once and read ever after."""
        tables = {
            f"level{level}_{name}": table
            for level, tables in enumerate(self._tables, start=2)
            for name, table in tables._asdict().items()
            if name != "max_rows"
        }
        return {"level_parents": self.parents, "level_depth": self.depth} | tables

    def rows_above(self, level: int) -> int:
        """Return the rows of a request that a pass for the drafts of `level` (2 is the second) runs."""
        return self.ends[level - 2] - 1

    def tables(self, level: int, num_seqs: int) -> TreeTables:
        """Return the tables of such a pass."""
        return self._tables[level - 2].first(num_seqs, num_seqs * self.rows_above(level))

    def _level(self, tree: DraftTree, size: int, device: torch.device | str) -> TreeTables:
        """Return the tables of `size` rows behind the root, for every request: a forest, if the root is not counted."""
        seen = tree.ancestors[1 : size + 1, 1 : size + 1]
        words = np.zeros((size, -(-size // WORD)), dtype=np.uint32)
        for place in range(size):
            words[:, place // WORD] |= seen[:, place].astype(np.uint32) << (place % WORD)
        seqs = np.arange(self.num_requests + 1, dtype=np.int32)
        of_row = {
            "parents": np.asarray(tree.parents[1 : size + 1], np.int32) - 1,
            "depth": (tree.depth[1 : size + 1] - 1).astype(np.int32),
        }
        whole = {name: np.tile(table, self.num_requests) for name, table in of_row.items()}
        tables = (whole["parents"], seqs * size, np.repeat(seqs[:-1], size), whole["depth"])
        parents, cu_rows, seq_of_row, depth = (torch.from_numpy(table).to(device) for table in tables)
        ancestors = torch.from_numpy(np.tile(words.view(np.int32), (self.num_requests, 1))).to(device)
        return TreeTables(parents, cu_rows, seq_of_row, depth, ancestors, size)


def drafter_class(vllm: ModuleType) -> type:
    """Return vLLM's drafter with the model's head; for engines without trees it does what its base does.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    class Drafter(vllm.MTPSpeculator):
        """Drafts the most likely tokens, as many as the tree has children, level by level."""

        treewy: Any = None

        def load_model(self, target_model: Any) -> None:
            super().load_model(target_model)
            shared = shared_of(self.vllm_config)
            if shared is None or shared.trees is None:
                return
            self.treewy = shared
            layers = self.vllm_config.compilation_config.static_forward_context
            _check_attention(layers)
            self._own = sorted(self.draft_attn_layer_names)
            for name in self._own:
                layers[name].impl.treewy_drafts = True
            self.levels = Levels(shared.trees.tree, self.max_num_reqs, self.device)
            rows = 1 + self.levels.rows_above(self.levels.num_levels) if self.levels.num_levels > 1 else 1
            options = {"dtype": self.dtype, "device": self.device}
            self._outputs = torch.zeros(self.max_num_reqs, rows, self.hidden_size, **options)
            self._lengths = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)
            self._nowhere = torch.full((self.max_num_reqs * rows,), NOWHERE, dtype=torch.int64, device=self.device)
            self._pages: Int[Tensor, "R columns"] | None = None
            layers_of(self.vllm_config)[0].treewy_lasting.add(self.levels.lasting | {"nowhere": self._nowhere})

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            super().init_cudagraph_manager(cudagraph_mode)
            if self.treewy is None:
                return
            captures = cudagraph_mode.decode_mode() == vllm.CUDAGraphMode.FULL
            mode = vllm.CUDAGraphMode.FULL_DECODE_ONLY if captures else vllm.CUDAGraphMode.NONE
            rows = self.treewy.memory.sizes.step_rows
            self._graphs = level_graphs(vllm)(self.vllm_config, self.device, mode, rows)

        def capture(self) -> None:
            if self.treewy is None:
                super().capture()
                return
            with self._one_step():
                super().capture()
            table = self.block_tables.input_block_tables[self._group()]
            self._pages = torch.zeros_like(table)
            self._graphs.capture(self._captured, progress_bar_desc="Capturing draft trees")

        def propose(
            self,
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            given = (input_batch, attn_metadata, slot_mappings, last_hidden_states)
            if self.treewy is None:
                return super().propose(*given, *args, **kwargs)
            trees = self.treewy.trees
            if trees.accepted is not None:
                trees.unshift_positions(input_batch.positions)
                trees.gather_paths(input_batch.input_ids, last_hidden_states)
            if "num_speculative_tokens" in kwargs:
                kwargs["num_speculative_tokens"] = 1
            with self._one_step():
                super().propose(*given, *args, **kwargs)
            self._draft_levels(input_batch.num_reqs, attn_metadata)
            return self.draft_tokens[: input_batch.num_reqs]

        def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.treewy is None:
                return super().sample_draft(hidden_states, *args, **kwargs)
            width = self.levels.widths[0]
            likely = self.model.compute_logits(hidden_states).topk(width).indices
            self.draft_tokens[: len(likely), :width] = likely
            return likely[:, 0]

        @contextmanager
        def _one_step(self) -> Iterator[None]:
            """Have the base class end after its first pass, which is where trees begin."""
            drafts = self.num_speculative_steps
            self.num_speculative_steps = 1
            try:
                yield
            finally:
                self.num_speculative_steps = drafts

        def _group(self) -> int:
            groups = self.kv_cache_config.kv_cache_groups
            return next(at for at, group in enumerate(groups) if self._own[0] in group.layer_names)

        def _draft_levels(self, num_reqs: int, attn_metadata: Any) -> None:
            """Draft the levels below the first, on a captured graph if there is one of this size."""
            if attn_metadata is None:
                self._run_levels(num_reqs, None)
                return
            table = attn_metadata[self._own[0]].block_table
            if self._pages is None:
                self._run_levels(num_reqs, table[:num_reqs])
                return
            self._pages[:num_reqs, : table.shape[1]].copy_(table[:num_reqs])
            desc = self._graphs.dispatch(num_reqs, num_reqs, 1, 0)
            if desc.cg_mode == vllm.CUDAGraphMode.FULL:
                self._graphs.run_fullgraph(desc)
            else:
                self._run_levels(num_reqs, self._pages[:num_reqs])

        def _captured(self, desc: Any, warmup: bool) -> Callable[[Any], None]:
            assert self._pages is not None
            pages = self._pages[: desc.num_reqs]
            return lambda _: self._run_levels(desc.num_reqs, pages)

        def _run_levels(self, num_reqs: int, pages: Tensor | None) -> None:
            """Draft the levels below the first.

            Args:
                num_reqs: Requests.
                pages: Pages of each in the drafter's cache; None in a dummy run without attention.
            """
            root = self.input_buffers.positions[:num_reqs].clone()
            lengths, outputs = self._lengths[:num_reqs], self._outputs[:num_reqs]
            lengths.copy_(root + 1)
            outputs[:, 0] = self.hidden_states[:num_reqs]
            for level in range(2, self.levels.num_levels + 1):
                self._run_level(level, root, lengths, pages)

        def _run_level(self, level: int, root: Tensor, lengths: Tensor, pages: Tensor | None) -> None:
            levels, num_reqs = self.levels, len(root)
            size, first = levels.rows_above(level), (levels.rows_above(level - 1) if level > 2 else 0)
            rows, outputs, drafts = num_reqs * size, self._outputs[:num_reqs], self.draft_tokens[:num_reqs]
            buffers = self.input_buffers
            buffers.input_ids[:rows].view(num_reqs, size).copy_(drafts[:, :size])
            positions = (root[:, None] + levels.depth[:size]).clamp(max=self.max_model_len - 1)
            buffers.positions[:rows].view(num_reqs, size).copy_(positions)
            parents = levels.parents[:size]
            self.hidden_states[:rows].view(num_reqs, size, -1).copy_(outputs[:, parents])
            metadata = slots = None
            if pages is not None:
                attended = Attended(levels.tables(level, num_reqs), lengths, pages, None)
                metadata = dict.fromkeys(self._own, LevelRows(attended))
                slots = dict.fromkeys(self._own, self._nowhere[:rows])
            self._prepare_eplb_forward(rows)
            last, hidden = self._run_model(rows, metadata, slots, None)
            newest = last[:rows].view(num_reqs, size, -1)[:, first:].flatten(0, 1)
            likely = self.model.compute_logits(newest).topk(levels.widths[level - 1]).indices
            drafts[:, size : levels.ends[level - 1] - 1] = likely.view(num_reqs, -1)
            if level < levels.num_levels:
                outputs[:, 1 + first : 1 + size] = hidden[:rows].view(num_reqs, size, -1)[:, first:]

    return Drafter


def _check_attention(layers: Mapping[str, Any]) -> None:
    """Check that softmax layers know of trees: others would take a tree's rows for a chain's, and say nothing.

    Raises:
        UnsupportedError: some do not.
    """
    others = {name: layer.impl for name, layer in layers.items() if getattr(layer, "impl", None) is not None}
    strange = {name: type(impl).__name__ for name, impl in others.items() if not hasattr(impl, "treewy_drafts")}
    if strange:
        name, kind = next(iter(strange.items()))
        raise UnsupportedError(
            f"Attention over trees must run in all {len(others)} softmax layers; {len(strange)} have another backend, {name} "
            f"has {kind}. Leave attention backends out of the configuration, or leave {WIDTHS} out."
        )


def level_graphs(vllm: ModuleType) -> type:
    """Return vLLM's captured graphs, of so many requests as the target has graphs for.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    class LevelGraphs(vllm.CudaGraphManager):
        """Graphs by requests: a request's rows are the same in all."""

        def __init__(self, vllm_config: Any, device: Any, mode: Any, step_rows: int) -> None:
            self._step_rows = step_rows
            super().__init__(vllm_config, device, mode, 1)

        def _init_candidates(self) -> None:
            sizes = self.compilation_config.cudagraph_capture_sizes or []
            self.compilation_config = copy.copy(self.compilation_config)
            counts = sorted({size // self._step_rows for size in sizes if size >= self._step_rows})
            self.compilation_config.cudagraph_capture_sizes = counts
            self.compilation_config.max_cudagraph_capture_size = max(counts, default=0)
            super()._init_candidates()

    return LevelGraphs
