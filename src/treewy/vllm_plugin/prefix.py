"""Prefix caching: pages at block boundaries hold the state of exactly the tokens up to there.

vLLM's "align" mode gives each block of tokens a page of its own. When a sequence enters a new block its state moves to
that block's page, and when an accepted path crosses a boundary the state at the boundary goes into the block that is
full. vLLM takes either from the snapshot of the right draft. Here there is one page: it moves as it is, its kept rows stay
with the request, and the boundary's state is rebuilt from the page and those of the kept rows that lie before it.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.shapes import Bool, Int, Tensor
from treewy.vllm_plugin.flush import flush_state, flush_window
from treewy.vllm_plugin.step import Drafted

# Steps that may be in flight before the host learns what they accepted: vLLM has one, and one is to spare.
MAX_STEPS_AHEAD = 2


class SplitCopies:
    """Stands in for vLLM's copies between pages: windows as vLLM copies them, states as they must be here.

    Args:
        copies: vLLM's, of windows and states alike.
        windows: The same for windows alone.
        states: The same for states alone.
        boundaries: Rebuilds states at block boundaries.
    """

    def __init__(self, copies: Any, windows: Any, states: Any, boundaries: "Boundaries") -> None:
        """Stand in for `copies`."""
        self.copies, self.windows, self.states, self.boundaries = copies, windows, states, boundaries

    def __getattr__(self, name: str) -> Any:
        """Everything else is vLLM's."""
        return getattr(self.copies, name)

    def run_fused_precopy(
        self, num_reqs: int, state_idx: Tensor, src_col: Tensor, token_bias: Tensor, idx_mapping: Tensor
    ) -> None:
        """Move requests that enter a new block to its page: windows behind what was accepted, states as they are."""
        self.windows.run_fused_precopy(num_reqs, state_idx, src_col, token_bias, idx_mapping)
        self.states.run_fused_precopy(num_reqs, state_idx, src_col, torch.zeros_like(token_bias), idx_mapping)

    def run_fused_postprocess_align(
        self, num_reqs: int, num_accepted: Tensor, state_idx: Tensor, num_computed: Tensor, idx_mapping: Tensor
    ) -> None:
        """Fill the pages of blocks that became full."""
        ended = self.boundaries.fill(self.states, num_reqs, num_accepted, state_idx, num_computed, idx_mapping)
        if ended is not None and self.boundaries.vllm.windows_race():
            self.boundaries.end_windows(ended, num_accepted, state_idx, idx_mapping)
        self.windows.run_fused_postprocess_align(num_reqs, num_accepted, state_idx, num_computed, idx_mapping)


class Boundaries:
    """Rebuilds the states of block boundaries that accepted paths crossed.

    Args:
        vllm: The compat module of the installed vLLM.
        layers: The plugin's layers.
        block_size: Tokens of a block.
    """

    def __init__(self, vllm: ModuleType, layers: Sequence[Any], block_size: int) -> None:
        """Know the layers; `begin` comes before each step."""
        self.vllm, self.layers, self.block_size = vllm, layers, block_size
        self.shared = layers[0].treewy
        self._drafted: Int[np.ndarray, "B"] = np.zeros(0, np.int32)
        self._tables: list[Tensor] = []

    def begin(self, drafted: Drafted, num_computed: Int[np.ndarray, "X"], tables: list[Tensor]) -> None:
        """Note which requests of a step may cross a boundary.

        Args:
            drafted: The requests that verify.
            num_computed: Tokens before the step of each request of the batch, as the host believes: too many by what
                steps in flight did not accept.
            tables: Block table of each layer, by request of the batch.
        """
        before = num_computed[drafted.batch]
        # A step in flight counts with all of its rows, whatever a path of them can be.
        least = np.maximum(before - MAX_STEPS_AHEAD * self.shared.memory.sizes.step_rows, 0)
        crosses = (before + drafted.sizes) // self.block_size > least // self.block_size
        self._drafted, self._tables = drafted.requests if crosses.any() else drafted.requests[:0], tables

    def fill(
        self,
        states: Any,
        num_reqs: int,
        num_accepted: Int[Tensor, "R"],
        state_idx: Int[Tensor, "R"],
        num_computed: Int[Tensor, "R"],
        idx_mapping: Int[Tensor, "X"],
    ) -> Bool[Tensor, "R"] | None:
        """Rebuild the state at each boundary that a path crossed, in the page of the block that ends there.

        Returns which requests' paths ended with the block in whose page their state lies; None if nobody crossed.

        Args:
            states: vLLM's copies of states.
            num_reqs: Requests of the batch.
            num_accepted: Rows that each request accepted in this step.
            state_idx: Block in whose page each request's state lies.
            num_computed: Tokens of each request after this step.
            idx_mapping: Request of each place of the batch.
        """
        if not len(self._drafted):
            return None
        lengths = self.shared.memory.lengths
        drafted = torch.zeros_like(lengths, dtype=torch.bool)
        drafted[torch.from_numpy(self._drafted).to(lengths.device).long()] = True
        aligned = num_computed // self.block_size * self.block_size
        crossed = drafted & (aligned > num_computed - num_accepted) & (aligned > 0)
        self._copy_pages(states, num_reqs, crossed, aligned, state_idx, idx_mapping)
        at = idx_mapping.long()
        places = torch.where(crossed[at], at, -1).to(torch.int32)
        block = (aligned // self.block_size - 1).clamp(min=0)
        own = torch.where(crossed, lengths - (num_computed - aligned), lengths).to(lengths.dtype)
        for layer, table in zip(self.layers, self._tables, strict=True):
            pages = table[: len(at)].gather(1, block[at].long()[:, None])[:, 0]
            kept = layer.treewy.memory.kept_of(layer.treewy_number)._replace(lengths=own)
            slots = torch.where(places >= 0, pages, -1).to(torch.int32)
            flush_state(self.vllm.state_of(layer), slots, kept, places, layer, self.shared.backend)
        # A request whose own page is that of the boundary ends there: nothing of it is outside the page any more.
        ended = crossed & (state_idx == block)
        lengths.masked_fill_(ended, 0)
        return ended

    def end_windows(
        self,
        ended: Bool[Tensor, "R"],
        num_accepted: Int[Tensor, "R"],
        state_idx: Int[Tensor, "R"],
        idx_mapping: Int[Tensor, "X"],
    ) -> None:
        """Bring windows forward whose requests ended with their block, and count one accepted row for them.

        vLLM's kernel would do both, each of its programs for one window and one of them for the count, which in 0.26 the
        others may read afterwards. Told of one row it has nothing to do. Other windows stay as they are.

        Args:
            ended: See `fill`.
            num_accepted: Rows that each request accepted in this step; 1 for those that ended, afterwards.
            state_idx: Block in whose page each request's state lies.
            idx_mapping: Request of each place of the batch.
        """
        at = idx_mapping.long()
        accepted, block = torch.where(ended, num_accepted, 1)[at], state_idx[at].long().clamp(min=0)[:, None]
        for layer, table in zip(self.layers, self._tables, strict=True):
            pages = table[: len(at)].gather(1, block)[:, 0]
            flush_window(self.vllm.window_of(layer), pages, accepted, layer.conv_kernel_size)
        num_accepted.masked_fill_(ended, 1)

    def _copy_pages(
        self, states: Any, num_reqs: int, crossed: Tensor, aligned: Tensor, state_idx: Tensor, idx_mapping: Tensor
    ) -> None:
        """Copy the running page to that of the boundary, where they differ.

        vLLM's kernel copies if a boundary lies among the newest `num_accepted` tokens. Told of one accepted token, it
        copies where that token is the boundary's, and nothing where it is the one behind.
        """
        told = torch.where(crossed, aligned, aligned + 1).to(torch.int32)
        states.run_fused_postprocess_align(num_reqs, torch.ones_like(told), state_idx, told, idx_mapping)
