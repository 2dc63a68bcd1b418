"""Preset files: published sizes, counted as transformers counts them, and found where the package is installed."""

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextForCausalLM

from treewy.errors import RequestError
from treewy.planner import find_gpu, gpu_names, model_names, per_sequence
from treewy.planner.catalogue import model_preset
from treewy.planner.weights import count_parameters

PRESETS = files("treewy.planner") / "presets"
CLASSES = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, Qwen3_5DecoderLayer),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeDecoderLayer),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, Qwen3NextDecoderLayer),
}
MIB = 1 << 20

# state in bfloat16, conv, and KV at 32,768 tokens, MiB; billions of parameters in the name
PUBLISHED = {
    "qwen3.5-0.8b": (9, 0.63, 384, 0.8),
    "qwen3.5-2b": (9, 0.63, 384, 2),
    "qwen3.5-4b": (24, 1.12, 1024, 4),
    "qwen3.5-9b": (24, 1.12, 1024, 9),
    "qwen3.5-27b": (72, 2.81, 2048, 27),
    "qwen3.5-35b-a3b": (30, 1.41, 640, 35),
    "qwen3.5-122b-a10b": (72, 2.53, 768, 122),
    "qwen3.5-397b-a17b": (90, 3.16, 960, 397),
    "qwen3-next-80b-a3b": (36, 1.69, 768, 80),
}


def content(name: str) -> dict:
    return tomllib.loads((PRESETS / "models" / f"{name}.toml").read_text())


def test_every_published_size_is_there() -> None:
    assert set(model_names()) == set(PUBLISHED)
    assert {"h100", "h200", "b200", "a100-80", "l40s", "rtx-4090", "rtx-5090"} == set(gpu_names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    state, conv, kv, billions = PUBLISHED[name]
    spec = model_preset(name).spec
    part = per_sequence(spec, rows=4, context=32768, dtype="bfloat16", state_dtype="bfloat16")
    assert (part.state, part.kv, part.snapshots) == (state * MIB, kv * MIB, 4 * state * MIB)
    assert part.conv / MIB == pytest.approx(conv, abs=0.006)
    assert part.draft_kv * spec.num_attention_layers == part.kv
    assert count_parameters(spec).target / 1e9 == pytest.approx(billions, rel=0.07)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_transformers_makes(name: str) -> None:
    """Tensor by tensor in all three families, head included, on no memory at all."""
    config, spec = content(name)["config"], model_preset(name).spec
    make_config, model_class, layer_class = CLASSES[config.pop("model_type")]
    hf_config = make_config(**config)
    with torch.device("meta"):
        model = model_class(hf_config)
        layer = layer_class(hf_config, hf_config.layer_types.index("full_attention"))
    counts = count_parameters(spec)
    assert counts.target == sum(parameter.numel() for parameter in model.parameters())
    join = 2 * spec.hidden_size**2 + 3 * spec.hidden_size
    assert counts.head == join + sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_says_where_it_comes_from(name: str) -> None:
    preset = content(name)
    assert preset["source"] == f"https://huggingface.co/{preset['hub_id']}/blob/main/config.json"
    assert preset["checked_against"]
    assert model_preset(name).spec.num_head_layers == 1


def test_gpus() -> None:
    """Usable memory, not the marketing figure; a number is GiB."""
    assert find_gpu("H200").memory_bytes == 143_771 * MIB
    assert find_gpu("b200").bandwidth_bytes_per_s == 8 * 10**12
    assert find_gpu("24").memory_bytes == 24 << 30
    assert find_gpu("0.5").memory_bytes == 1 << 29
    assert all(find_gpu(name).source for name in gpu_names())


@pytest.mark.parametrize("name", ["0", "-3", "nan", "inf", "1e30"])
def test_memory_that_is_none(name: str) -> None:
    with pytest.raises(RequestError, match="positive number of GiB"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "hint"), [("h20", "Did you mean h200"), ("gtx", "Choose one"), ("80GB", "Choose one")]
)
def test_a_gpu_that_is_not_known(name: str, hint: str) -> None:
    with pytest.raises(RequestError, match=hint):
        find_gpu(name)


def test_preset_files_are_package_data() -> None:
    """What setuptools is told to install holds every preset file."""
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["treewy"]
    source = root / "src" / "treewy"
    installed = {file for pattern in declared for file in source.glob(pattern)}
    presets = set((source / "planner" / "presets").rglob("*.toml"))
    assert len(presets) == len(PUBLISHED) + 1
    assert presets <= installed
