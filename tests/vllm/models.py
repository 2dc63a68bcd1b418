"""Random hybrids on disk, each with its head: tiny ones that vLLM's CPU build can run, and one of real sizes for GPUs."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import vllm_model

from fixtures import TEXT_CONFIG, _write_tokenizer, _write_weights, random_weights
from fixtures_families import MOE, NEXT, _multimodal, family_weights, split_experts

# vLLM's CPU kernels of Gated DeltaNet take head dims 64 and 128, and bfloat16; its mixtures want multiples of 32.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "dtype": "bfloat16",
}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4, "mlp_only_layers": []}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": TEXT_CONFIG | SIZES | {"architectures": ["Qwen3_5ForCausalLM"]},
    "moe": MOE | SIZES | EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"], "mtp_num_hidden_layers": 1},
    "next": NEXT | SIZES | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "num_nextn_predict_layers": 1},
}

# Of Qwen3.5-35B-A3B, in the layout of its hub; all other sizes are its own.
FEWER = {"vocab_size": 512, "num_experts": 16, "max_position_embeddings": 8192}
LAYERS = 8

# How far layers move the residual stream, against the token's embedding. Mixers do so by enough that texts do not soon
# repeat themselves, and the rest by so little that a head without the mixers' memory still guesses half of the tokens.
MIXED, OTHER = 0.5, 0.1
MIXERS = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight")


def write_model(
    folder: Path, name: str, *, seed: int = 0, remembers: float = 0.0, hears: float = 0.0, **overrides: object
) -> Path:
    """Write a checkpoint of one of `CONFIGS` and return its folder.

    Args:
        folder: Made if it is not there.
        name: "dense" (Qwen3.5), "moe" (Qwen3.5 with experts), "next" (Qwen3-Next), or "gpu" (`of_real_sizes`).
        seed: Decides all weights.
        remembers: Recurrent states forget as slowly as this says, as a logarithm: 0 within few tokens, 6 within hundreds.
        hears: What the head makes of hidden rows and of the tokens before the last one, against the last token; at 0 next
            to nothing, so that it guesses well.
        overrides: Entries of the config.
    """
    config = (of_real_sizes() if name == "gpu" else CONFIGS[name]) | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", {key: value for key, value in config.items() if key != "architectures"})
    weights = random_weights(text, seed) if name == "dense" else split_experts(family_weights(text, seed))
    weights = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in _drafting(weights, hears).items()}
    for key in weights:
        if key.endswith("A_log"):
            weights[key] = weights[key] - remembers
    if "text_config" in config:
        weights = {_multimodal(key): tensor for key, tensor in weights.items()}
    _write_weights(folder, weights, shards=1)
    _write_tokenizer(folder)
    return folder


def of_real_sizes() -> dict[str, Any]:
    """Return the config of a model whose layers are those of Qwen3.5-35B-A3B; some 1 GB."""
    config = vllm_model.model_config(Namespace(model="qwen3.5-35b-a3b", layers=LAYERS, tiny=False))
    special = {name: FEWER["vocab_size"] - len(vllm_model.SPECIAL) + i for i, name in enumerate(vllm_model.SPECIAL)}
    return config | special | {"text_config": config["text_config"] | FEWER}


def _drafting(weights: dict[str, torch.Tensor], hears: float) -> dict[str, torch.Tensor]:
    """Return the weights with branches scaled, and a head that guesses what follows, from the last token alone if it can."""
    scaled = {name: tensor * _scale(name, hears) for name, tensor in weights.items()}
    hidden = weights["model.norm.weight"].shape[0]
    # The head's first layer takes the embedding and the hidden row side by side.
    scaled["mtp.fc.weight"] = torch.cat([torch.eye(hidden), hears * torch.eye(hidden)], dim=1)
    scaled["mtp.norm.weight"] = weights["model.norm.weight"]
    return scaled


def _scale(name: str, hears: float) -> float:
    if name.endswith(MIXERS):
        return max(OTHER, hears) if name.startswith("mtp.") else MIXED
    return OTHER if name.endswith("down_proj.weight") else 1.0
