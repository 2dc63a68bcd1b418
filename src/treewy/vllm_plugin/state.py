"""The engine's hooks around a step: tables before the forward, kept rows after sampling."""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.packed import PathTables
from treewy.vllm_plugin.announcement import announce
from treewy.vllm_plugin.compaction import Compaction
from treewy.vllm_plugin.flush import clear, flush
from treewy.vllm_plugin.prefix import Boundaries, SplitCopies
from treewy.vllm_plugin.step import Drafted, dummies
from treewy.vllm_plugin.tree_sampler import needs_root_alone, sampler_class


def model_state_class(vllm: ModuleType) -> type:
    """Return the model state of hybrids; for models without a layer of ours it does what its base does.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    class ModelState(vllm.MambaHybridModelState):
        """Runs the step of the plugin's layers beside vLLM's own bookkeeping."""

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            self.treewy_layers = layers_of(vllm_config)
            self.treewy = self.treewy_layers[0].treewy if self.treewy_layers else None
            if self.treewy is not None:
                self.treewy.step.tracks = False  # vLLM knows
            self._runs_requests = self._announced = self._is_real = False
            self._sampler: Any = None
            self._compaction: Compaction | None = None
            self._group_of_layer: torch.Tensor | None = None
            self._tables: list[torch.Tensor] = []
            self.boundaries: Boundaries | None = None
            self._in_prompts = np.zeros((2, 0), np.intp)
            self._index_of: dict[str, int] = {}
            self._removed: tuple[str, int | None] = ("", None)

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self._removed = req_id, self._index_of.pop(req_id, None)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            """Let a request begin. vLLM removes each first: one that was still there goes on, with its pages and more input."""
            goes_on = self.treewy is not None and self._removed == (new_req_data.req_id, req_index)
            where = self._where() if goes_on else []
            before = [table[req_index].clone() for table in where]
            super().add_request(req_index, new_req_data)
            for table, value in zip(where, before, strict=True):
                table[req_index] = value
            if self.treewy is not None and not goes_on:
                self.treewy.forget(req_index)
            if self._sampler is not None:
                self._sampler.alone[req_index] = needs_root_alone(new_req_data.sampling_params)
            self._index_of[new_req_data.req_id] = req_index

        def _where(self) -> list[torch.Tensor]:
            """What says where in a request's pages its state and window are."""
            aligned = [self._mamba_state_idx_gpu] if self._align_mode else []
            return [self.num_accepted_tokens_gpu, *aligned]

        def preprocess_state(
            self, input_batch: Any, block_tables: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
        ) -> None:
            if self.treewy is not None:
                groups = kv_cache_config.kv_cache_groups
                of_layer = {
                    name: table for group, table in zip(groups, block_tables, strict=True) for name in group.layer_names
                }
                self._tables = [of_layer[layer.prefix] for layer in self.treewy_layers]
                verifying = vllm.drafted_rows(input_batch)
                self._flush_undrafted(self.treewy, input_batch, verifying)
                self._clear_unwritten(input_batch)
                self._in_prompts = self._verify_in_prompts(input_batch, verifying)
                self._runs_requests = True  # not called for dummy batches, whose indices are nobody's
            super().preprocess_state(input_batch, block_tables, kv_cache_config, *args, **kwargs)

        def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if self.treewy is not None:
                if self._runs_requests:
                    self._announce(args[3] if len(args) > 3 else kwargs["kv_cache_config"])
                    drafted = _drafted(vllm, input_batch)
                else:
                    sizes = input_batch.num_scheduled_tokens[: input_batch.num_reqs]
                    drafted = dummies(sizes, self.treewy.memory.sizes.step_rows)
                self._is_real, self._runs_requests = self._runs_requests, False
                full = cudagraph_mode == vllm.CUDAGraphMode.FULL
                num_seqs = input_batch.num_reqs_after_padding if full else len(drafted.requests)
                num_rows = input_batch.num_tokens_after_padding if full else drafted.num_rows
                of_all = len(drafted.requests) == input_batch.num_reqs
                if full:
                    drafted.check_captured(input_batch.num_reqs)
                requests = input_batch.idx_mapping if of_all and self._is_real else None
                self.treewy.step.begin(drafted, num_seqs, num_rows, full_graph=full, requests=requests)
                if self.treewy.trees is not None:
                    self.treewy.trees.begin(drafted, self.treewy.step.tables, input_batch)
                if self.boundaries is not None:
                    self.boundaries.begin(drafted, input_batch.num_computed_tokens_np, self._tables)
            return super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)

        def prepare_inputs(self, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            """Give rows of trees the positions that their depths say; their places in the caches are made by now."""
            inputs = super().prepare_inputs(input_batch, *args, **kwargs)
            if self._is_real and self.treewy is not None and self.treewy.trees is not None:
                self.treewy.trees.shift_positions(input_batch.positions)
                if "positions" in inputs:
                    self.treewy.trees.shift_positions(inputs["positions"])
            return inputs

        def custom_sampler(self, sampler: Any) -> Any:
            if self.treewy is None or self.treewy.trees is None:
                return super().custom_sampler(sampler)
            config = self.vllm_config
            num_ids = config.model_config.get_vocab_size()
            self._sampler = sampler_class(vllm)(sampler, config.speculative_config, self.treewy, num_ids)
            self.treewy_layers[0].treewy_lasting.add(self._sampler.lasting)
            return sampler, self._sampler

        def postprocess_state(self, idx_mapping: torch.Tensor, num_sampled: Any, *args: Any, **kwargs: Any) -> None:
            if self.treewy is not None:
                path = self.treewy.finish(num_sampled)
                if path is not None and self.treewy.trees is not None:
                    self._compact(self.treewy, path)
            super().postprocess_state(idx_mapping, num_sampled, *args, **kwargs)
            if self.treewy is not None:
                # vLLM may copy such a page before the next step, for others to find the prompt's beginning.
                self._flush(self.treewy, *self._in_prompts)

        def _compact(self, shared: Any, path: PathTables) -> None:
            """Move what the accepted rows wrote to where a chain's rows would have."""
            if self._compaction is None:
                self._compaction = Compaction(vllm, self.vllm_config, self.treewy_layers)
            trees, requests = shared.trees, shared.step.requests[: len(path.lengths)].long()
            rows = torch.arange(len(requests), device=requests.device) if trees.batch is None else trees.batch
            self._compaction.run(trees, path, self._pages(rows, requests))

        def _pages(self, rows: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
            """Return the page of some requests in each layer [L, B]."""
            block = self._mamba_state_idx_gpu[requests].long() if self._align_mode else torch.zeros_like(requests)
            tables = list({id(table): table for table in self._tables}.values())  # layers of one group share theirs
            if self._group_of_layer is None:
                groups = [next(at for at, own in enumerate(tables) if own is table) for table in self._tables]
                self._group_of_layer = torch.tensor(groups, device=rows.device)
            return torch.stack([table[rows, block] for table in tables])[self._group_of_layer]

        def _announce(self, kv_cache_config: Any) -> None:
            """Say once what fits: at the first step of requests, vLLM's own at start-up. Dummies run on other blocks before."""
            if self.treewy is not None and not self._announced:
                self._announced = True
                announce(self.treewy, kv_cache_config, self.max_model_len)

        def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
            super().initialize_kv_cache(*args, **kwargs)
            self._split_copies()

        def _ensure_align_ctx(self, *args: Any, **kwargs: Any) -> Any:
            super()._ensure_align_ctx(*args, **kwargs)
            self._split_copies()
            return self._mamba_ctx

        def _split_copies(self) -> None:
            """Let boundaries have the last word where pages are copied; vLLM makes its copies at a time of its own."""
            copies = getattr(self, "_mamba_ctx", None)
            if self.treewy is not None and copies is not None and not isinstance(copies, SplitCopies):
                self.boundaries = Boundaries(vllm, self.treewy_layers, copies.block_size)
                windows, states = vllm.split_copies(copies)
                self._mamba_ctx = SplitCopies(copies, windows, states, self.boundaries)

        def _clear_unwritten(self, batch: Any) -> None:
            """Empty the pages of prompts that verify from their first token on: no prompt of theirs was ever written."""
            unwritten = vllm.unwritten_rows(batch)
            if len(unwritten):
                rows = torch.as_tensor(unwritten, device=batch.idx_mapping.device)
                clear(vllm, self.treewy_layers, [table[rows, 0] for table in self._tables])

        def _flush_undrafted(self, shared: Any, batch: Any, verifying: np.ndarray) -> None:
            """Bring the pages of requests up to date that kept rows and now take vLLM's own path, which knows of none."""
            others = np.setdiff1d(np.arange(batch.num_reqs), verifying)
            others = others[shared.step.keeps[batch.idx_mapping_np[others]]]
            self._flush(shared, others, batch.idx_mapping_np[others])

        def _verify_in_prompts(self, batch: Any, verifying: np.ndarray) -> np.ndarray:
            """Return the places of requests that verify a token of their prompt, and the requests; where prefixes are cached."""
            places = verifying[batch.is_prefilling_np[verifying] & self._align_mode]
            return np.stack([places, batch.idx_mapping_np[places]])

        def _flush(self, shared: Any, places: np.ndarray, requests: np.ndarray) -> None:
            """Bring the pages of requests up to date, which then keep nothing."""
            if not len(places):
                return
            device = self.num_accepted_tokens_gpu.device
            rows, indices = (torch.as_tensor(x, device=device).long() for x in (places, requests))
            pages = self._pages(rows, indices)
            flush(vllm, self.treewy_layers, pages, indices.to(torch.int32), self.num_accepted_tokens_gpu[indices])
            self.num_accepted_tokens_gpu[indices] = 1
            for request in requests:
                shared.forget(int(request))

    return ModelState


def layers_of(vllm_config: Any) -> list[Any]:
    """Return the plugin's layers of an engine, in the order of the model."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if getattr(layer, "treewy", None) is not None]


def _drafted(vllm: ModuleType, batch: Any) -> Drafted:
    chosen = vllm.drafted_rows(batch)
    sizes = np.asarray(batch.num_scheduled_tokens, dtype=np.int32)
    return Drafted(chosen, batch.idx_mapping_np[chosen].astype(np.int32), sizes[chosen])
