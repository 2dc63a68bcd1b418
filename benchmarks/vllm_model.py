"""The vLLM engine of the benchmarks: the shape of a Qwen3.5 model with dummy weights, and its options.

Acceptance is vLLM's own synthetic one, so that speed means something although the weights do not.
"""

import argparse
import json
import os
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from treewy.planner import catalogue

MODEL = "qwen3.5-35b-a3b"
# What models of the family have alike, beside the sizes in the planner's catalogue; the vision tower is never built.
ALIKE = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mtp_use_dedicated_embeddings": False,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
VISION = {
    "model_type": "qwen3_5_moe",
    "depth": 2,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
ARCHITECTURES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# Sizes that a CPU can run: they try the benchmark, and measure nothing.
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": ALIKE["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}
TINY_DENSE = {"intermediate_size": 256}
TINY_EXPERTS = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "num_experts": 4,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine."""
    add = parser.add_argument
    add(
        "--commit",
        choices=("none", "store_all", "reconstruct", "ring"),
        default="reconstruct",
        help="none: no drafting",
    )
    add("--model", choices=model_names(), default=MODEL, help="whose sizes; the weights are dummies")
    add("--widths", type=_widths, help="draft a tree, as 3,3,3: children of each row, level by level")
    add("--drafts", type=int, default=3, help="tokens of the draft chain where there are no widths")
    add("--acceptance", type=float, default=3.24, help="tokens per step; 0: those that the drafts earn")
    add("--utilisation", type=float, default=0.6)
    add("--state-dtype", default="float32")
    add("--max-model-len", type=int, default=4096)
    add("--layers", type=int, help="fewer than the model has")
    add(
        "--runner",
        type=int,
        choices=(1, 2),
        help="vLLM's model runner; the second if neither this nor VLLM_USE_V2_MODEL_RUNNER says anything",
    )
    add(
        "--compiled",
        action="store_true",
        help="compile the model and capture pieces of steps with prompts, as vLLM does by default; a start takes minutes",
    )
    add(
        "--tiny",
        action="store_true",
        help="a tiny model on a CPU, to try the benchmark itself with few and short requests",
    )


def model_names() -> list[str]:
    """Return the models of the catalogue that the benchmarks can build."""
    return [name for name in catalogue.model_names() if name.startswith("qwen3.5")]


def shape(given: dict[str, Any]) -> str:
    """Return what a record's options say of its model, in words; the first records name none."""
    if given.get("tiny"):
        return "a tiny model"
    name = given.get("model", MODEL)
    layers = given.get("layers") or catalogue.model_preset(name).config["num_hidden_layers"]
    return ", ".join([f"{name.title()} shape, {layers} layers", *manner(given)])


def manner(given: dict[str, Any]) -> list[str]:
    """Return what else a record's options say of how vLLM ran the model: nothing if it was as the first records have it."""
    return ["compiled"] * bool(given.get("compiled")) + ["first runner"] * (given.get("runner") == 1)


def _widths(text: str) -> list[int]:
    return [int(width) for width in text.split(",")]


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the command's options; of a tree, the drafts are its own."""
    given = parser.parse_args()
    if given.widths:
        if given.commit not in ("reconstruct", "ring"):
            parser.error(f"--widths need --commit reconstruct or ring; got {given.commit}")
        given.drafts = sum(accumulate(given.widths, mul))
    return given


def header(benchmark: str, given: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Return a result file's first line."""
    from treewy.bench.environment import environment

    device = "cpu" if given.tiny else "cuda"
    return {
        "benchmark": benchmark,
        "environment": environment(device, seed, also=("vllm", "triton")),
        "options": vars(given),
    }


def make_engine(given: argparse.Namespace, folder: str, largest: int) -> Any:
    """Return the engine, for up to `largest` requests at once; its folder is read while it is made."""
    # Before the first import of vLLM, which reads them.
    if given.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(given.runner - 1)
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    from treewy.vllm_plugin.tree_config import capture_sizes

    Path(folder, "config.json").write_text(json.dumps(model_config(given)))
    rows = 1 if given.commit == "none" else 1 + given.drafts
    graphs = {} if given.compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        language_model_only=True,
        dtype="bfloat16",
        mamba_ssm_cache_dtype=given.state_dtype,
        max_model_len=given.max_model_len,
        max_num_seqs=largest,
        gpu_memory_utilization=given.utilisation,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **drafting(given),
        compilation_config=graphs | {"cudagraph_capture_sizes": capture_sizes(largest, rows)},
    )


def model_config(given: argparse.Namespace) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    sizes = catalogue.model_preset(given.model).config
    text = ALIKE | sizes | ({} if not given.tiny else TINY | (TINY_EXPERTS if "num_experts" in sizes else TINY_DENSE))
    text["num_hidden_layers"] = num_layers = given.layers or text["num_hidden_layers"]
    text["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    kind = text["model_type"].removesuffix("_text")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": VISION | {"model_type": kind, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{name: text["vocab_size"] - 264 + i for i, name in enumerate(SPECIAL)},
    }


def drafting(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that say how to draft and how to commit."""
    additional: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if given.commit == "none":
        return {"additional_config": additional}
    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": given.drafts}
    if given.acceptance:
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": given.acceptance}
    if given.commit != "store_all":
        additional["treewy"] = {"mamba_state_commit": given.commit}
        if given.widths:
            additional["treewy"]["draft_tree_widths"] = given.widths
    return {"additional_config": additional, "speculative_config": speculative}


def token_ids(given: argparse.Namespace) -> tuple[int, int]:
    """Return the bounds of the token ids that prompts are made of; none of them is special."""
    return (10, 200) if given.tiny else (10, 30_000)


def capacity(engine: Any) -> dict[str, int]:
    """Return blocks and their tokens."""
    cache = engine.llm_engine.vllm_config.cache_config
    return {"num_blocks": cache.num_gpu_blocks, "block_size": cache.block_size}


def counters(engine: Any) -> dict[str, float]:
    """Return vLLM's counters of drafting and preemption."""
    wanted = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "num_preemptions")
    found = {metric.name.removeprefix("vllm:"): metric for metric in engine.get_metrics()}
    return {name: found[name].value for name in wanted if name in found}
