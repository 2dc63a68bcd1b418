"""One vLLM engine with dummy weights, at some numbers of requests: python benchmarks/vllm_engine.py --commit reconstruct.

Needs a GPU and vLLM beside treewy. Acceptance is vLLM's own synthetic one, so that speed means something although the
weights do not. Every engine is a process of its own; alternate the processes to compare. Prints JSON lines: the
environment, then one line per number of requests.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

# Sizes of Qwen3.5-35B-A3B; the vision tower is never built.
VOCABULARY = 248_320
TEXT = {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
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
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--commit",
        choices=("none", "store_all", "reconstruct", "ring"),
        default="reconstruct",
        help="none: no drafting",
    )
    add("--requests", type=int, nargs="+", default=[256])
    add("--utilisation", type=float, default=0.6)
    add("--prompt", type=int, default=1024, help="tokens of each prompt")
    add("--output", type=int, default=168, help="tokens that each request generates")
    add("--drafts", type=int, default=3)
    add("--acceptance", type=float, default=3.24, help="tokens per step")
    add("--state-dtype", default="float32")
    add("--max-model-len", type=int, default=4096)
    add("--layers", type=int, default=40)
    add("--rounds", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run one engine."""
    given = options()
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from treewy.bench.environment import environment

    print(
        json.dumps(
            {
                "benchmark": "vllm",
                "environment": environment("cuda", 0, also=("vllm", "triton")),
                "options": vars(given),
            }
        ),
        flush=True,
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(given, folder)
    print(json.dumps({"row": "start", "seconds": time.perf_counter() - start, **capacity(engine)}), flush=True)
    for count in given.requests:
        print(json.dumps(measure(engine, given, count)), flush=True)
    os._exit(0)  # an engine in this process would wait for its own threads


def make_engine(given: argparse.Namespace, folder: str) -> Any:
    """Return the engine; its folder is read while it is made."""
    from vllm import LLM

    text = TEXT | {"num_hidden_layers": given.layers}
    text["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(given.layers)]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "torch_dtype": "bfloat16",
    }
    config |= {"text_config": text, "vision_config": VISION, "tie_word_embeddings": False}
    config |= {name: VOCABULARY - 264 + i for i, name in enumerate(SPECIAL)}
    Path(folder, "config.json").write_text(json.dumps(config))
    rows = 1 if given.commit == "none" else 1 + given.drafts
    additional: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    speculative = None
    if given.commit != "none":
        speculative = {"method": "mtp", "num_speculative_tokens": given.drafts}
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": given.acceptance}
        if given.commit != "store_all":
            additional["treewy"] = {"mamba_state_commit": given.commit}
    largest = max(given.requests)
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
        additional_config=additional,
        speculative_config=speculative,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [rows * count for count in capture_counts(largest)],
        },
    )


def capture_counts(largest: int) -> list[int]:
    """Return the numbers of requests to capture graphs for: steps run at the next larger one."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16), largest]
    return sorted({count for count in counts if count <= largest})


def capacity(engine: Any) -> dict[str, int]:
    """Return blocks and their tokens."""
    cache = engine.llm_engine.vllm_config.cache_config
    return {"num_blocks": cache.num_gpu_blocks, "block_size": cache.block_size}


def measure(engine: Any, given: argparse.Namespace, count: int) -> dict[str, Any]:
    """Time whole runs, and runs of a few tokens to take away: what is left is decoding."""
    short = 8
    run(engine, given, count, short)
    rounds = []
    for _ in range(given.rounds):
        before = counters(engine)
        few, whole = (run(engine, given, count, tokens) for tokens in (short, given.output))
        after = counters(engine)
        gained = {name: after[name] - before.get(name, 0) for name in after}
        rounds.append(
            {
                "decode_tokens_per_s": count * (given.output - short) / (whole - few),
                "tokens_per_s": count * given.output / whole,
                "seconds": whole,
                "counters": gained,
            }
        )
    medians = {name: median(one[name] for one in rounds) for name in ("decode_tokens_per_s", "tokens_per_s")}
    return {"row": "run", "commit": given.commit, "requests": count, **medians, "rounds": rounds}


def run(engine: Any, given: argparse.Namespace, count: int, tokens: int) -> float:
    """Return the seconds that requests of random prompts take together."""
    import torch
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(count + tokens)
    shape = (count, given.prompt)
    prompts = [{"prompt_token_ids": ids} for ids in torch.randint(10, 30_000, shape, generator=random).tolist()]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def counters(engine: Any) -> dict[str, float]:
    """Return vLLM's counters of drafting and preemption."""
    wanted = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "num_preemptions")
    found = {metric.name.removeprefix("vllm:"): metric for metric in engine.get_metrics()}
    return {name: found[name].value for name in wanted if name in found}


if __name__ == "__main__":
    sys.exit(main())
