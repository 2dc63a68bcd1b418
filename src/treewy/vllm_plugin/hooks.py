"""What the plugin overrides or replaces in vLLM, by name and parameters: probed where a version is untested, pinned where it is.

A hook is a body that ours stands in for, or calls: when it changes, ours may be wrong although it still runs. The tests
of this table pin the source of each for the tested versions.
"""

import inspect
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from treewy.vllm_plugin import tree_hooks
from treewy.vllm_plugin.tree_hooks import NEW, OLD


class Hook(NamedTuple):
    """A function or method of vLLM.

    Attributes:
        module: Where it stands.
        name: Its qualified name there.
        parameters: Names of its parameters, in order.
        only: The tested minor version that has it, as in (0, 32); None if all do.
        cpu, gpu: Whether it runs on a CPU or on a GPU only, and may be impossible to import elsewhere.
    """

    module: str
    name: str
    parameters: str
    only: tuple[int, int] | None = None
    cpu: bool = False
    gpu: bool = False


LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
BASE = "vllm.model_executor.layers.mamba.abstract"
METADATA = "vllm.v1.attention.backends.gdn_attn"
STATES = "vllm.v1.worker.gpu.model_states"
STATE = f"{STATES}.mamba_hybrid"
ARGUMENTS = "vllm.engine.arg_utils"
CPU = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
COPIES = "vllm.v1.worker.mamba_utils"
PAGES = "vllm.v1.attention.backends.utils"
SECOND = "vllm.v1.worker.gpu.model_runner"
FIRST = "vllm.v1.worker.gpu_model_runner"
GRAPHS = "vllm.v1.cudagraph_dispatcher"
MOVED = "self num_reqs state_idx_gpu src_col_gpu token_bias_gpu idx_mapping"
BOUNDS = "self num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices logits_indices"
BUILT = f"{BOUNDS} use_spec_decode for_cudagraph_capture num_scheduled_tokens"
BUILT_NEW = f"{BOUNDS} max_num_sampled_tokens use_spec_decode for_cudagraph_capture num_scheduled_tokens"
PREPARED = "self input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config for_capture"

HOOKS = (
    Hook(
        LAYER,
        "QwenGatedDeltaNetAttention.__init__",
        "self config vllm_config prefix gqa_interleaved_layout reduce_results",
    ),
    Hook(LAYER, "QwenGatedDeltaNetAttention.forward_cuda", "self hidden_states"),
    Hook(LAYER, "QwenGatedDeltaNetAttention._forward_core", "self mixed_qkv b a core_attn_out"),
    Hook(LAYER, "QwenGatedDeltaNetAttention.get_state_shape", "self"),
    Hook(BASE, "MambaBase.get_kv_cache_spec", "self vllm_config"),
    Hook(BASE, "MambaBase.get_attn_backend", "self"),
    Hook(BASE, "MambaBase.bind_kv_cache", "self kv_cache", only=NEW),
    Hook(METADATA, "GDNAttentionMetadataBuilder.__init__", "self kv_cache_spec layer_names vllm_config device"),
    Hook(
        METADATA,
        "GDNAttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata num_accepted_tokens num_decode_draft_tokens_cpu fast_build",
    ),
    Hook(METADATA, "GDNAttentionMetadataBuilder.build_for_cudagraph_capture", "self common_attn_metadata"),
    Hook(
        METADATA,
        "GDNAttentionMetadataBuilder.update_block_table",
        "self metadata blk_table slot_mapping",
        only=NEW,
    ),
    Hook(PAGES, "mamba_get_block_table_tensor", "block_table seq_lens kv_cache_spec mamba_cache_mode"),
    Hook(STATE, "MambaHybridModelState.__init__", "self vllm_config model encoder_cache device"),
    Hook(STATE, "MambaHybridModelState.add_request", "self req_index new_req_data"),
    Hook(
        STATE,
        "MambaHybridModelState.preprocess_state",
        "self input_batch block_tables kv_cache_config num_computed_tokens",
    ),
    Hook(STATE, "MambaHybridModelState.prepare_attn", PREPARED, only=OLD),
    Hook(
        STATE,
        "MambaHybridModelState.prepare_attn",
        f"{PREPARED} ubatch_idx model_specific_attn_metadata",
        only=NEW,
    ),
    Hook(STATE, "MambaHybridModelState.postprocess_state", "self idx_mapping num_sampled num_computed_tokens"),
    Hook(
        STATE, "MambaHybridModelState._ensure_align_ctx", "self kv_cache_config mamba_group_ids block_tables", only=OLD
    ),
    Hook(STATE, "MambaHybridModelState.initialize_kv_cache", "self kv_cache_config block_tables", only=NEW),
    Hook(COPIES, "MambaSpecDecodeGPUContext.run_fused_precopy", MOVED),
    Hook(
        COPIES,
        "MambaSpecDecodeGPUContext.run_fused_postprocess_align",
        "self num_reqs num_accepted_tokens_gpu state_idx_gpu new_num_computed_tokens_gpu idx_mapping",
    ),
    Hook(
        FIRST, "GPUModelRunner._build_attention_metadata", f"{BUILT} cascade_attn_prefix_lens slot_mappings", only=OLD
    ),
    Hook(FIRST, "GPUModelRunner._build_attention_metadata", f"{BUILT_NEW} slot_mappings", only=NEW),
    Hook(FIRST, "GPUModelRunner._update_states_after_model_execute", "self output_token_ids scheduler_output"),
    Hook(
        GRAPHS,
        "CudagraphDispatcher.dispatch",
        "self num_tokens uniform_decode has_lora num_active_loras valid_modes invalid_modes",
    ),
    Hook(
        SECOND,
        "GPUModelRunner.execute_model",
        "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile",
        only=OLD,
    ),
    Hook(STATES, "init_model_state", "vllm_config model encoder_cache device"),
    Hook(STATES, "resolve_model_state_cls", "vllm_config model", only=NEW),
    Hook(ARGUMENTS, "EngineArgs.create_engine_config", "self usage_context headless"),
    Hook(CPU, "cpu_gdn_attention_core", "mixed_qkv b a core_attn_out layer_name", only=NEW, cpu=True),
    Hook(
        CPU,
        "_spec_forward",
        "layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width state_len",
        only=NEW,
        cpu=True,
    ),
    *(
        Hook(found.module, name, parameters, found.only, found.cpu, found.gpu)
        for found in tree_hooks.TABLE
        for name, parameters in found.parameters.items()
    ),
)


def of_version(minor: tuple[int, int]) -> tuple[Hook, ...]:
    """Return the hooks that a tested minor version has."""
    return tuple(hook for hook in HOOKS if hook.only in (None, minor))


@cache
def find_mismatches(hooks: tuple[Hook, ...], *, on_cpu: bool) -> list[str]:
    """Return what the installed vLLM has otherwise than `hooks` say: one line each, nothing if all is as expected.

    A process is probed once, before the plugin takes hold: afterwards its own classes stand where vLLM's did.
    """
    found = [_mismatch(hook) for hook in hooks if not (hook.gpu if on_cpu else hook.cpu)]
    return [line for line in found if line]


def resolve(hook: Hook) -> Any:
    """Return the function that a hook names.

    Raises:
        ImportError: its module is not there.
        AttributeError: its name is not.
    """
    found: Any = import_module(hook.module)
    for part in hook.name.split("."):
        found = getattr(found, part)
    return found


def _mismatch(hook: Hook) -> str:
    try:
        function = resolve(hook)
    except (ImportError, AttributeError) as error:
        return f"{hook.module}:{hook.name} is missing ({error})"
    parameters = " ".join(inspect.signature(function).parameters)
    if parameters == hook.parameters:
        return ""
    return f"{hook.module}:{hook.name} takes ({parameters}) instead of ({hook.parameters})"
