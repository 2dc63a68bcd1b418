"""Stand-ins for vLLM's classes, which do what its comments say, in Python."""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from treewy.vllm_plugin.layer import Shared
from treewy.vllm_plugin.options import Options
from vllm_plugin.rows import LAYERS, Engine

WIDTH = 4


class Copies:
    """vLLM's copies of states, or of windows, between the pages of a request; tables are by request."""

    def __init__(
        self, pages: list[torch.Tensor], tables: list[torch.Tensor], block_size: int, *, windows: bool
    ) -> None:
        self.pages, self.tables, self.block_size, self.windows = pages, tables, block_size, windows
        self.other, self.calls = "vLLM's", 0

    def run_fused_precopy(self, num_reqs, state_idx, src_col, token_bias, idx_mapping):
        """Move what lies in the page of the old block, behind what was accepted, to that of the new."""
        for request in idx_mapping[:num_reqs].tolist():
            source, target = int(src_col[request]), int(state_idx[request])
            if source >= 0 and source != target:
                self._copy(request, source, target, int(token_bias[request]))

    def run_fused_postprocess_align(self, num_reqs, num_accepted, state_idx, num_computed, idx_mapping):
        """Fill the page of a block whose last token is among the newest `num_accepted`."""
        self.calls += 1
        for request in idx_mapping[:num_reqs].tolist():
            first = int(num_computed[request] - num_accepted[request]) + 1
            aligned = int(num_computed[request]) // self.block_size * self.block_size
            if aligned < first:
                continue
            source, target = int(state_idx[request]), aligned // self.block_size - 1
            if source == target:
                num_accepted[request] = 1
            if source != target or aligned != first:
                self._copy(request, source, target, aligned - first)

    def _copy(self, request: int, source: int, target: int, bias: int) -> None:
        for pages, table in zip(self.pages, self.tables, strict=True):
            if self.windows:
                # What lies behind the newest column stays as it was.
                moved = pages[table[request, source], :, bias:].clone()
                pages[table[request, target], :, : moved.shape[1]] = moved
            else:
                pages[table[request, target]] = pages[table[request, source + bias]].clone()


def layers_on(engine: Engine, windows: torch.Tensor) -> list[Any]:
    """Return the plugin's layers as model state and boundaries find them, over an engine and windows [L, S, C, X]."""
    shared = Shared(Options("reconstruct"), engine.memory, engine.step, "eager", engine.checker)
    a_log, dt_bias = engine.gates
    return [
        SimpleNamespace(
            prefix=f"layer{number}",
            treewy=shared,
            treewy_number=number,
            A_log=a_log,
            dt_bias=dt_bias,
            conv_kernel_size=WIDTH,
            states=engine.states[number],
            window=windows[number],
        )
        for number in range(LAYERS)
    ]


class ModelState:
    """vLLM's model state of hybrids, as far as the plugin's calls it: it notes what it finds."""

    def __init__(self, vllm_config: Any, align: bool = False) -> None:
        self.max_model_len, self._align_mode = 64, align
        self.num_accepted_tokens_gpu = torch.ones(8, dtype=torch.int32)
        self._mamba_state_idx_gpu = torch.zeros(8, dtype=torch.int32)
        self.seen: list[tuple[str, Any]] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Start counting again."""
        self.num_accepted_tokens_gpu[req_index] = 1
        self._mamba_state_idx_gpu[req_index] = 7
        self.seen.append(("add", req_index))

    def remove_request(self, req_id: str) -> None:
        """Forget a request, or one that was never there."""
        self.seen.append(("remove", req_id))

    def preprocess_state(self, input_batch: Any, block_tables: Any, kv_cache_config: Any, num_computed: Any) -> None:
        """Run between the plugin's flush and its tables."""
        self.seen.append(("preprocess", self.num_accepted_tokens_gpu.tolist()))

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
    ) -> dict[str, Any]:
        """Build metadata: of the tables that are there."""
        self.seen.append(("prepare", self.treewy and self.treewy.step.tables))  # pyright: ignore[reportAttributeAccessIssue]
        return {"metadata": None}

    def postprocess_state(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_computed: Any = None) -> None:
        """Note what each request accepted."""
        self.num_accepted_tokens_gpu[idx_mapping] = num_sampled.clamp(min=1).to(torch.int32)
        lengths = self.treewy and self.treewy.memory.lengths.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        self.seen.append(("postprocess", lengths))


def compat(**names: Any) -> ModuleType:
    """Return a compat module with the functions that read a layer's pages."""
    module = ModuleType("compat")
    vars(module).update(
        state_of=lambda layer: layer.states,
        window_of=lambda layer: layer.window,
        drafted_rows=lambda batch: np.flatnonzero(batch.drafts),
        unwritten_rows=lambda batch: np.zeros(0, np.intp),
        second_runner_with_the_fault=lambda: None,
        windows_race=lambda: False,
        CUDAGraphMode=SimpleNamespace(NONE=0, FULL=2),
        MambaHybridModelState=ModelState,
        **names,
    )
    return module
