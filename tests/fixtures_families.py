"""Tiny random checkpoints of every model family beside dense Qwen3.5, on disk in each layout the hub has."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import OlmoHybridConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeRMSNorm,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextForCausalLM,
    Qwen3NextRMSNorm,
)

from fixtures import EOS, HIDDEN, MAX_LEN, TEXT_CONFIG, VISION_CONFIG, VOCAB, _write_tokenizer, _write_weights

EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

# Three value heads a key head, and key and value dims that differ.
MOE = (
    {key: value for key, value in TEXT_CONFIG.items() if key not in ("intermediate_size", "mtp_num_hidden_layers")}
    | EXPERTS
    | {"model_type": "qwen3_5_moe_text", "linear_num_value_heads": 6, "linear_value_head_dim": 8}
)

# One dense layer among the sparse ones, as `mlp_only_layers` may ask.
NEXT = MOE | {
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

# A value head a key head, as released; values twice as wide as keys.
OLMO = {
    "model_type": "olmo_hybrid",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "eos_token_id": EOS,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Kind(NamedTuple):
    """One model family as transformers has it; a family without a head has no layer class for it."""

    config: type
    model: type
    layer: type | None
    norm: type | None


KINDS = {
    "qwen3_5_moe_text": Kind(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
    "qwen3_next": Kind(Qwen3NextConfig, Qwen3NextForCausalLM, Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
    "olmo_hybrid": Kind(OlmoHybridConfig, OlmoHybridForCausalLM, None, None),
}


class Layout(NamedTuple):
    """How a checkpoint names its tensors and where its config stands."""

    text: dict[str, Any]
    fused: bool = True
    multimodal: bool = False
    shards: int = 1


LAYOUTS = {
    "moe": Layout(MOE),
    "moe-experts": Layout(MOE, fused=False, shards=3),
    "moe-multimodal": Layout(MOE, multimodal=True, shards=2),
    "moe-multimodal-experts": Layout(MOE, fused=False, multimodal=True),
    "moe-ratio-1": Layout(MOE | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 24}),
    "next": Layout(NEXT, fused=False, shards=2),
    "next-fused": Layout(NEXT),
    "next-ratio-1": Layout(
        NEXT | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 24}
    ),
    "olmo": Layout(OLMO),
    "olmo-rope": Layout(OLMO | {"rope_parameters": ROPE, "linear_num_value_heads": 8}, shards=2),
    "olmo-positive": Layout(
        OLMO | {"linear_allow_neg_eigval": False, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
    ),
}
# Layouts of models that differ; the others hold the same weights under other names.
MODELS = ["moe", "moe-ratio-1", "next", "next-ratio-1", "olmo", "olmo-rope", "olmo-positive"]
WITH_HEAD = [name for name in LAYOUTS if not name.startswith("olmo")]


def write_family(
    folder: Path,
    layout: str,
    *,
    seed: int = 0,
    head: bool = True,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """Write a checkpoint with random weights in one of `LAYOUTS` and return its folder."""
    text, fused, multimodal, shards = LAYOUTS[layout]
    text = text | {"dtype": str(dtype).removeprefix("torch.")} | overrides
    weights = family_weights(text, seed, head=head)
    weights = hub_names(text["model_type"], weights, fused=fused)
    kind = KINDS[text["model_type"]]
    config = text | {"architectures": [kind.model.__name__]}
    if multimodal:
        weights = {_multimodal(name): tensor for name, tensor in weights.items()}
        weights["model.visual.patch_embed.proj.bias"] = torch.zeros(8)
        config = {
            "model_type": "qwen3_5_moe",
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": text,
            "vision_config": VISION_CONFIG | {"model_type": "qwen3_5_moe_vision"},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder, {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}, shards)
    _write_tokenizer(folder)
    return folder


def family_weights(text: dict[str, Any], seed: int, *, head: bool = True) -> dict[str, torch.Tensor]:
    """Return weights under transformers' own names, at the scale of trained ones: every part moves the logits."""
    kind = KINDS[text["model_type"]]
    config = kind.config(**{key: value for key, value in text.items() if key not in ("model_type", "dtype")})
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in kind.model(config).state_dict().items()}
        if head and kind.layer is not None:
            whole = kind.config(**{**config.to_dict(), "layer_types": ["full_attention"] * config.num_hidden_layers})
            shapes |= {f"mtp.layers.0.{name}": p.shape for name, p in kind.layer(whole, 0).state_dict().items()}
            shapes["mtp.fc.weight"] = torch.Size([config.hidden_size, 2 * config.hidden_size])
            norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            shapes |= {f"mtp.{name}.weight": torch.Size([config.hidden_size]) for name in norms}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    centred = text["model_type"] != "olmo_hybrid"
    return {name: _random(name, shape, generator, centred) for name, shape in sorted(shapes.items())}


def _random(name: str, shape: torch.Size, generator: torch.Generator, centred: bool) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator) * 2.5
    if name.endswith("dt_bias"):
        return noise * 0.5 - 3
    if "norm" in name:  # weights around 0 that are added to 1, but plain ones in OLMo and in gated norms
        return noise * 0.1 + (not centred or "linear_attn.norm" in name)
    if name.endswith("embed_tokens.weight"):
        return noise
    # Routers and betas that decide: experts apart, betas near both ends of their range.
    strong = ("lm_head.weight", "mlp.gate.weight", "b_proj.weight", "in_proj_b.weight", "in_proj_ba.weight")
    fan_in = shape[-1] if "experts" in name else shape[1:].numel()
    return noise * (2.0 if name.endswith(strong) else 1.0) * math.sqrt(1 / fan_in)


def hub_names(model_type: str, weights: dict[str, torch.Tensor], *, fused: bool) -> dict[str, torch.Tensor]:
    """Return the weights as a hub checkpoint has them: one tensor per expert, or OLMo's own convolutions and norms."""
    if model_type == "olmo_hybrid":
        return _olmo_names(weights)
    return weights if fused else split_experts(weights)


def split_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with one tensor per expert and projection."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            split[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if last == "down_proj":
                split[f"{stem}.{number}.down_proj.weight"] = expert
                continue
            half = expert.shape[0] // 2
            split[f"{stem}.{number}.gate_proj.weight"] = expert[:half]
            split[f"{stem}.{number}.up_proj.weight"] = expert[half:]
    return split


def _olmo_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        stem = name.split("linear_attn.")[0]
        if name.endswith("linear_attn.conv1d.weight"):
            keys = weights[f"{stem}linear_attn.k_proj.weight"].shape[0]
            parts = tensor.split([keys, keys, tensor.shape[0] - 2 * keys])
            named |= {f"{stem}linear_attn.{x}_conv1d.weight": part for x, part in zip("qkv", parts, strict=True)}
        elif f"{name.rsplit('.', 2)[0]}.linear_attn.q_proj.weight" in weights and "layernorm" in name:
            own = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
            layer, norm, last = name.rsplit(".", 2)
            named[f"{layer}.{own[norm]}.{last}"] = tensor
        else:
            named[name] = tensor
    return named


def _multimodal(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
