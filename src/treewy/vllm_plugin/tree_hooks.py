"""What draft trees override or call in vLLM, as `hooks` takes it: by module, version and platform, names and parameters."""

from typing import NamedTuple

OLD, NEW = (0, 26), (0, 32)
WORKER = "vllm.v1.worker.gpu"
ATTENTION = "vllm.v1.attention"
BACKENDS = f"{ATTENTION}.backends"
DRAFTING = f"{WORKER}.spec_decode"

MANAGER = "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases"
DISPATCH = "self num_reqs num_tokens uniform_token_count num_active_loras"
GRAPH = "num_tokens_across_dp cudagraph_runtime_mode mm_inputs"
PROPOSE = (
    "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected last_sampled "
    "next_prefill_tokens temperature seeds"
)
DUMMY = "dummy_run skip_attn_for_dummy_run mm_inputs is_profile"
PREFILL = (
    "last_token_indices current_draft_step input_buffers input_batch num_sampled num_rejected last_sampled "
    "next_prefill_tokens max_num_reqs"
)
DRAFT = "idx_mapping temperature seeds draft_step draft_logits"
FORWARD = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
UPDATE = "self layer key value kv_cache slot_mapping"
BUILD = "self common_prefix_len common_attn_metadata fast_build"
RANDOM = "logits expanded_idx_mapping temperature seed pos apply_temperature"


class Names(NamedTuple):
    """Functions of a module.

    Attributes:
        module: Where they stand.
        parameters: Of each, by its qualified name.
        only, cpu, gpu: As in `hooks.Hook`.
    """

    module: str
    parameters: dict[str, str]
    only: tuple[int, int] | None = None
    cpu: bool = False
    gpu: bool = False


def _autoregressive(owner: str) -> dict[str, str]:
    return {
        f"{owner}.__init__": "self vllm_config device",
        f"{owner}.init_cudagraph_manager": "self cudagraph_mode",
        f"{owner}.capture": "self",
        f"{owner}._run_model": f"self num_tokens attn_metadata slot_mappings {GRAPH}",
        f"{owner}._prefill": f"self num_reqs num_tokens attn_metadata slot_mappings {GRAPH}",
        "prepare_prefill_inputs": PREFILL,
    }


DRAFTER = (
    Names(
        f"{DRAFTING}.mtp.speculator", {"MTPSpeculator.load_draft_model": "self target_model target_attn_layer_names"}
    ),
    Names(
        f"{DRAFTING}.speculator",
        {
            "DraftModelSpeculator.__init__": "self vllm_config device",
            "DraftModelSpeculator.load_model": "self target_model",
            "DraftModelSpeculator.set_attn": "self model_state kv_cache_config block_tables target_input_buffers "
            "target_attn_groups",
            "DraftModelSpeculator._prepare_eplb_forward": "self num_unpadded_tokens",
        },
    ),
    Names(
        f"{DRAFTING}.speculator",
        {"DraftModelSpeculator.sample_draft": f"self hidden_states positions {DRAFT}"},
        OLD,
    ),
    Names(
        f"{DRAFTING}.speculator",
        {"DraftModelSpeculator.sample_draft": f"self hidden_states sample_src_positions {DRAFT} spec_step_idx"},
        NEW,
    ),
    Names(
        f"{DRAFTING}.autoregressive.speculator",
        _autoregressive("AutoRegressiveSpeculator")
        | {"AutoRegressiveSpeculator.propose": f"{PROPOSE} num_tokens_across_dp {DUMMY}"},
        OLD,
    ),
    Names(
        f"{DRAFTING}.target_dependent_ar.speculator",
        _autoregressive("TargetDependentARSpeculator")
        | {
            "TargetDependentARSpeculator.load_model": "self target_model",
            "TargetDependentARSpeculator.propose": f"{PROPOSE} dp_sync_state {DUMMY} num_speculative_tokens",
        },
        NEW,
    ),
)
GRAPHS = (
    Names(
        f"{WORKER}.cudagraph_utils",
        {
            "CudaGraphManager._init_candidates": "self",
            "CudaGraphManager.capture": "self create_forward_fn progress_bar_desc",
            "CudaGraphManager.run_fullgraph": "self desc",
        },
    ),
    Names(
        f"{WORKER}.cudagraph_utils",
        {"CudaGraphManager.__init__": MANAGER, "CudaGraphManager.dispatch": DISPATCH},
        OLD,
    ),
    Names(
        f"{WORKER}.cudagraph_utils",
        {
            "CudaGraphManager.__init__": f"{MANAGER} varlen_decode ubatch_runner",
            "CudaGraphManager.dispatch": f"{DISPATCH} max_query_len num_ubatches",
        },
        NEW,
    ),
)
SAMPLING = (
    Names(
        f"{DRAFTING}.rejection_sampler",
        {
            "RejectionSampler.__init__": "self sampler spec_config device",
            "RejectionSampler.__call__": "self logits input_batch draft_logits",
        },
        OLD,
    ),
    Names(
        f"{DRAFTING}.rejection_sampler",
        {
            "RejectionSampler.__init__": "self sampler spec_config device watermark_key",
            "RejectionSampler.__call__": "self logits input_batch draft_logits invalid_drafts",
        },
        NEW,
    ),
    Names(
        f"{WORKER}.sample.sampler",
        {
            "Sampler.apply_sampling_params": "self logits expanded_idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "skip_top_k_top_p"
        },
        OLD,
    ),
    Names(
        f"{WORKER}.sample.sampler",
        {
            "Sampler.apply_sampling_params": "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
            "expanded_local_pos seq_lens_upper_bound_np skip_top_k_top_p"
        },
        NEW,
    ),
    Names(
        f"{WORKER}.sample.gumbel",
        {"gumbel_sample": f"{RANDOM} output_processed_logits output_processed_logits_col use_fp64"},
        OLD,
    ),
    Names(
        f"{WORKER}.sample.gumbel",
        {"gumbel_sample": f"{RANDOM} is_drafting logits_cache logits_cache_col use_fp64 logits_cache_source"},
        NEW,
    ),
    Names(
        f"{WORKER}.sample.logprob",
        {
            "compute_topk_scores": "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state "
            "expanded_idx_mapping max_per_req_token_ids logits_mode",
            "LogprobTokenIdsState.max_num_token_ids": "self idx_mapping_np",
        },
    ),
    Names(f"{WORKER}.metrics.logits", {"get_num_nans": "logits"}),
    Names(
        f"{WORKER}.input_batch",
        {
            "get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
            "combine_sampled_and_draft_tokens": "input_ids idx_mapping last_sampled_tokens query_start_loc seq_lens prefill_len "
            "draft_tokens cu_num_logits num_logits num_new_sampled_tokens",
        },
    ),
    Names(f"{WORKER}.model_states.interface", {"ModelState.custom_sampler": "self sampler"}),
    Names(f"{WORKER}.model_states.default", {"DefaultModelState.prepare_inputs": "self input_batch req_states"}),
)
PAGES = (
    Names(f"{BACKENDS}.registry", {"register_backend": "backend class_path is_mamba"}),
    Names(
        f"{BACKENDS}.flash_attn",
        {
            "FlashAttentionMetadataBuilder.build": BUILD,
            "FlashAttentionImpl.forward": FORWARD,
            "FlashAttentionImpl.do_kv_cache_update": UPDATE,
        },
        gpu=True,
    ),
    Names(
        f"{BACKENDS}.flash_attn",
        {
            "FlashAttentionBackend.get_kv_cache_shape": "num_blocks block_size num_kv_heads head_size cache_dtype_str",
            "FlashAttentionBackend.get_kv_cache_stride_order": "include_num_layers_dimension",
        },
        OLD,
        gpu=True,
    ),
    Names(
        f"{BACKENDS}.cpu_attn",
        {
            "CPUAttentionMetadataBuilder.build": BUILD,
            "CPUAttentionBackendImpl.forward": FORWARD,
            "CPUAttentionBackendImpl.do_kv_cache_update": UPDATE,
        },
        NEW,
        cpu=True,
    ),
    Names(
        f"{ATTENTION}.selector",
        {"_cached_get_attn_backend": "backend attn_selector_config num_heads _run_kv_cache_dtype"},
        NEW,
        cpu=True,
    ),
)
TABLE = (*DRAFTER, *GRAPHS, *SAMPLING, *PAGES)
