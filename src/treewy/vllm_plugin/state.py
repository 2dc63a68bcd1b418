"""The engine's hooks around a step: tables before the forward, kept rows after sampling."""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.vllm_plugin.step import Drafted


def model_state_class(vllm: ModuleType) -> type:
    """Return the model state of hybrids; for models without a layer of ours it does what its base does.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    class ModelState(vllm.MambaHybridModelState):
        """Runs the step of the plugin's layers beside vLLM's own bookkeeping."""

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            shared = shared_of(vllm_config)
            self.treewy_step = None if shared is None else shared.step
            self.treewy_checker = None if shared is None else shared.checker
            self._runs_requests = False

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            if self.treewy_step is not None:
                self.treewy_step.forget(req_index)
            if self.treewy_checker is not None:
                self.treewy_checker.forget(req_index)

        def preprocess_state(self, *args: Any, **kwargs: Any) -> None:
            super().preprocess_state(*args, **kwargs)
            self._runs_requests = True  # not called for dummy batches, whose indices are nobody's

        def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if self.treewy_step is not None:
                full = cudagraph_mode == vllm.CUDAGraphMode.FULL
                sizes = np.asarray(input_batch.num_scheduled_tokens[: input_batch.num_reqs], dtype=np.int32)
                if self._runs_requests:
                    chosen = vllm.drafted_rows(input_batch)
                    drafted = Drafted(chosen, input_batch.idx_mapping_np[chosen].astype(np.int32), sizes[chosen])
                else:
                    batch = np.arange(len(sizes))
                    drafted = Drafted(batch, np.full(len(sizes), -1, np.int32), sizes)
                num_seqs = input_batch.num_reqs_after_padding if full else len(drafted.requests)
                num_rows = input_batch.num_tokens_after_padding if full else drafted.num_rows
                self.treewy_step.begin(drafted, num_seqs, num_rows)
                self._runs_requests = False
            return super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)

        def postprocess_state(self, idx_mapping: torch.Tensor, num_sampled: Any, *args: Any, **kwargs: Any) -> None:
            super().postprocess_state(idx_mapping, num_sampled, *args, **kwargs)
            if self.treewy_step is not None:
                self.treewy_step.finish(num_sampled)

    return ModelState


def shared_of(vllm_config: Any) -> Any:
    """Return what the plugin's layers of this engine share, or None where it has none."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return next((layer.treewy for layer in layers if getattr(layer, "treewy", None) is not None), None)
