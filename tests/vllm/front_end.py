"""Makes configurations as vLLM's front ends do, in a process of its own, and reports what came of each. No engine, no weights.

    python front_end.py < cases.json > outcomes.json

where a case is the arguments of `EngineArgs`. Also: how vLLM itself lays out the memory of a hybrid of given sizes. With a
`version`, the installed vLLM says that it is that one.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

INTERPRETER = Path(sys.prefix) / "triton_interp"
# A model's sizes; nothing of it is loaded.
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 512,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


def ask(folder: Path, **questions: Any) -> dict[str, Any]:
    """Ask a fresh process, in which the second model runner can run."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(INTERPRETER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({"model": str(folder), **questions}),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def make(model: str, arguments: dict[str, Any]) -> Any:
    """Return a whole configuration."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=model, skip_tokenizer_init=True, dtype="bfloat16", **arguments).create_engine_config()


def attempt(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what the plugin reads of a configuration, or why there is none."""
    from treewy.vllm_plugin import facts, scrape

    environment = arguments.pop("environment", {})
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        config = make(model, arguments)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        os.environ.clear()
        os.environ.update(before)
    fields = {
        "cache": [x for x in facts.OTHER_POLICIES if hasattr(config.cache_config, x)],
        "speculative": [x for x in facts.DYNAMIC_DRAFTS if hasattr(config.speculative_config, x)],
    }
    read = facts.read(config)._asdict()
    return {"additional": config.additional_config, "facts": read, "fields": fields, "shown": len(scrape._shown)}


def lay_out(model: str, drafts: int, blocks: int, block_size: int, page_bytes: int, available: int) -> dict[str, Any]:
    """Return vLLM's own layout of the 35B-A3B shape: 30 recurrent layers, 10 softmax layers and a head's."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from treewy.vllm_plugin.accounting import read_layout

    config = make(model, {"max_model_len": 4096, "enable_prefix_caching": False})
    config.cache_config.block_size = block_size
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "LBNHC"
    state = MambaSpec(
        shapes=((3 + drafts, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=4096,
        page_size_padded=page_bytes,
        num_speculative_blocks=blocks,
    )
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    specs = {f"state.{i}": state for i in range(30)} | {f"attention.{i}": attention for i in range(11)}
    [made] = get_kv_cache_configs(config, [specs], [available])
    return {"layout": read_layout(made), "num_blocks": made.num_blocks}


def pretend(version: str) -> None:
    """Let the installed vLLM have another version."""
    true = metadata.version
    metadata.version = lambda name: version if name == "vllm" else true(name)


def main() -> None:
    """Answer the questions on stdin."""
    from treewy.vllm_plugin import register

    asked = json.load(sys.stdin)
    if "version" in asked:
        pretend(asked["version"])
    register()
    register()
    cases = {name: attempt(asked["model"], arguments) for name, arguments in asked["cases"].items()}
    layouts = [lay_out(asked["model"], **sizes) for sizes in asked["layouts"]]
    print()
    print(json.dumps({"cases": cases, "layouts": layouts}))


if __name__ == "__main__":
    main()
