"""Tiny random Qwen3.5 checkpoints on disk, in both layouts the hub has."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5ForCausalLM

VOCAB, HIDDEN, EOS, MAX_LEN = 128, 64, 127, 256
LAYOUTS = ("text", "multimodal")

TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "eos_token_id": EOS,
    "mtp_num_hidden_layers": 1,
}
VISION_CONFIG = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": HIDDEN}


def write_checkpoint(
    folder: Path,
    layout: str = "text",
    *,
    seed: int = 0,
    head: bool = True,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """Write a checkpoint with random weights and return its folder.

    Args:
        folder: Made if it is not there.
        layout: "text" (`model.layers.*`, flat config) or "multimodal" (`model.language_model.*`, nested config, a
            vision tensor that a text model ignores). `mtp.*` and `lm_head.*` stand at top level in both.
        seed: Decides all weights.
        head: Whether the multi-token-prediction head is written.
        shards: Weight files; more than one come with an index.
        dtype: Of the weights on disk.
        overrides: Entries of the text config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = TEXT_CONFIG | {"dtype": str(dtype).removeprefix("torch.")} | overrides
    weights = random_weights(text, seed, head=head)
    if layout == "multimodal":
        weights = {_multimodal(name): tensor for name, tensor in weights.items()}
        weights["model.visual.patch_embed.proj.bias"] = torch.zeros(8)
        config = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": text,
            "vision_config": VISION_CONFIG | {"model_type": "qwen3_5_vision"},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
    else:
        config = text | {"architectures": ["Qwen3_5ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder, {name: tensor.to(dtype) for name, tensor in weights.items()}, shards)
    _write_tokenizer(folder)
    return folder


def random_weights(text: dict, seed: int, *, head: bool = True) -> dict[str, torch.Tensor]:
    """Return weights under the text-only names, at the scale of trained ones: every part moves the logits."""
    config = Qwen3_5TextConfig(**{key: value for key, value in text.items() if key not in ("model_type", "dtype")})
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3_5ForCausalLM(config).state_dict().items()}
        if head:
            layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
            shapes |= {f"mtp.layers.0.{name}": p.shape for name, p in layer.state_dict().items()}
            shapes["mtp.fc.weight"] = torch.Size([config.hidden_size, 2 * config.hidden_size])
            norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            shapes |= {f"mtp.{name}.weight": torch.Size([config.hidden_size]) for name in norms}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator) * 2.5
    if name.endswith("dt_bias"):
        return noise * 0.5 - 3
    if "norm" in name:  # zero-centred everywhere but in linear_attn
        return noise * 0.1 + ("linear_attn.norm" in name)
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise * (2.0 if name == "lm_head.weight" else 1.0) * shape[1:].numel() ** -0.5


def _multimodal(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(sorted(weights.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words t0 .. t126 and an end-of-text token."""
    words = {f"t{number}": number for number in range(EOS)} | {"<end>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.fixture(scope="session", params=LAYOUTS)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    """A checkpoint with its head, in each layout."""
    return checkpoints(request.param)


@pytest.fixture(scope="session")
def text_checkpoint(checkpoints: Callable[[str], Path]) -> Path:
    """A text-only checkpoint with its head."""
    return checkpoints("text")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a layout's checkpoint once."""
    written: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in written:
            written[layout] = write_checkpoint(tmp_path_factory.mktemp(layout), layout)
        return written[layout]

    return get
