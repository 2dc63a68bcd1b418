"""Attention metadata of Gated DeltaNet layers: vLLM's own, and the tables of the step beside it."""

from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.vllm_plugin.step import Tables

# Counts of requests and rows that are no drafts.
COUNTS = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")


def backend_class(vllm: ModuleType) -> type:
    """Return the attention backend of layers that verify in closed form.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    @dataclass
    class Metadata(vllm.GDNAttentionMetadata):
        """vLLM's metadata, with the step's tables, that of the rows that are no drafts, and how many rows of drafts lead.

        The number is None where rows of drafts do not all come before the others.
        """

        treewy: Tables | None = None
        rest: Any = None
        leading_rows: int | None = None

    class Builder(vllm.GDNAttentionMetadataBuilder):
        """Builds vLLM's metadata for one state per request, and sends every decoding row down the drafted path.

        The chained base builds it once per group of layers; the step's tables are the same in all groups.
        """

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            layers = vllm_config.compilation_config.static_forward_context
            self.step = layers[layer_names[0]].treewy.step
            # Tables of states have one column; what is copied into a wider one would be broadcast.
            self.spec_state_indices_tensor = self.spec_state_indices_tensor[:, :1].contiguous()
            # vLLM's buffers are as large as its captured graphs, and steps without one may have more requests.
            num_requests = self.step.memory.sizes.num_requests
            self._slots = torch.full((num_requests, 1), vllm.NULL_BLOCK_ID, dtype=torch.int32, device=device)
            # It shares what build() made for another group, and would share this step's tables without their owner knowing.
            self.supports_update_block_table = False

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            num_accepted_tokens: torch.Tensor | None = None,
            num_decode_draft_tokens_cpu: torch.Tensor | None = None,
            **options: Any,
        ) -> Any:
            known: torch.Tensor | None = self.step.num_accepted
            accepted = num_accepted_tokens if known is None else known
            if accepted is not None and self._all_verify(common_attn_metadata):
                return self._verifying(common_attn_metadata, accepted)
            if known is not None and len(self.step.drafted.requests):
                num_accepted_tokens, num_decode_draft_tokens_cpu = (
                    known,
                    torch.full((len(known),), -1, dtype=torch.int32),
                )
            if num_decode_draft_tokens_cpu is not None:
                num_decode_draft_tokens_cpu = self._drafts(num_decode_draft_tokens_cpu)
            built = super().build(
                common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, **options
            )
            own = {field.name: getattr(built, field.name) for field in fields(built)}
            if built.spec_sequence_masks is None:
                return Metadata(**own)
            drafted = self.step.drafted
            leads = np.array_equal(drafted.batch, np.arange(len(drafted.batch)))
            leading = drafted.num_rows if leads else None
            return Metadata(**own, treewy=self.step.tables, rest=_rest(built), leading_rows=leading)

        def _all_verify(self, batch: Any) -> bool:
            """Return whether the batch is nothing but requests that verify, and padding."""
            tables, drafted = self.step.tables, self.step.drafted
            whole = tables is not None and tables.tree.num_seqs == batch.num_reqs
            return whole and 0 < drafted.num_rows == int(batch.query_start_loc_cpu[batch.num_reqs])

        def _verifying(self, batch: Any, num_accepted: torch.Tensor) -> Metadata:
            """Return metadata of such a batch: the step's tables are all that layers need, but for the pages of this group.

            What captured graphs read lies in the same buffers in every step.
            """
            tables, count, num_seqs = self.step.tables, len(self.step.drafted.requests), batch.num_reqs
            mode = self.vllm_config.cache_config.mamba_cache_mode
            pages = vllm.mamba_get_block_table_tensor(
                batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode
            )
            slots = self._slots[:num_seqs]
            slots[:count].copy_(pages[:count, :1])
            if count < num_seqs:
                slots[count:].fill_(vllm.NULL_BLOCK_ID)
            return Metadata(
                **dict.fromkeys(COUNTS, 0),
                num_spec_decodes=num_seqs,
                num_spec_decode_tokens=self.step.drafted.num_rows,
                num_actual_tokens=batch.num_actual_tokens,
                spec_query_start_loc=tables.tree.cu_rows,
                spec_state_indices_tensor=slots,
                spec_sequence_masks=tables.fold,  # that there is one says that requests verify; nobody reads it
                num_accepted_tokens=self.step.share_accepted(num_accepted, num_seqs),
                treewy=tables,
                leading_rows=self.step.drafted.num_rows,
            )

        def _drafts(self, given: torch.Tensor) -> torch.Tensor:
            """Return drafts of each request, -1 where it takes vLLM's own path; a request that drafted nothing counts for one.

            vLLM looks only at the sign and, in 0.26, at whether any request drafted: a step without drafts would leave the
            drafted path, the only one that knows of kept rows.
            """
            marked = torch.full_like(given, -1)
            batch = torch.from_numpy(self.step.drafted.batch).long()
            marked[batch] = 1
            return marked

    class Backend(vllm.GDNAttentionBackend):
        """Names the builder above to vLLM."""

        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    return Backend


def _rest(built: Any) -> Any:
    """Return metadata of a batch's undrafted rows alone, as if they were a batch of their own; None if there are none."""
    if built.num_prefills == 0 and built.num_decodes == 0:
        return None
    return replace(
        built,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=built.num_prefill_tokens + built.num_decode_tokens,
        spec_sequence_masks=None,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        num_accepted_tokens=None,
    )
