"""What a checkpoint of a supported family may ask for or lack, refused by name before anything runs."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OlmoHybridConfig, PreTrainedModel

import treewy
from fixtures_families import LAYOUTS, write_family
from treewy.errors import RequestError, UnsupportedError
from treewy.hf import HFTarget
from treewy.hf.families import FAMILIES, SUPPORTED

EXPERTS = "model.layers.2.mlp.experts."


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("moe-experts", lambda w: w.pop(EXPERTS + "3.up_proj.weight"), r"lacks .*2\.mlp\.experts\.3\.up_proj\.weight"),
        ("moe-experts", lambda w: w.pop(EXPERTS + "4.down_proj.weight"), r"lacks .*experts\.4\.down_proj\.weight"),
        (
            "moe-experts",
            lambda w: [w.pop(EXPERTS + f"5.{x}_proj.weight") for x in ("gate", "up", "down")],
            r"experts\.down_proj of .* is \(5, 64, 24\) and should be \(6, 64, 24\)",
        ),
        (
            "moe-experts",
            lambda w: w.update({EXPERTS + "down_proj": torch.zeros(6, 64, 24)}),
            r"holds .*2\.mlp\.experts\.down_proj and single experts as well",
        ),
        ("moe", lambda w: w.pop(EXPERTS + "gate_up_proj"), r"lacks .*2\.mlp\.experts\.gate_up_proj"),
        (
            "moe",
            lambda w: w.update({EXPERTS + "gate_up_proj": torch.zeros(6, 64, 48)}),
            r"gate_up_proj of .* is \(6, 64, 48\) and should be \(6, 48, 64\)",
        ),
        (
            "moe",
            lambda w: w.update({"model.layers.4.mlp.gate.weight": torch.zeros(6, 64)}),
            r"holds model\.layers\.4\.mlp\.gate\.weight and 0 more",
        ),
        (
            "next",
            lambda w: w.update({"model.layers.0.linear_attn.in_proj_z.weight": torch.zeros(48, 64)}),
            r"holds model\.layers\.0\.linear_attn\.in_proj_z\.weight",
        ),
        ("olmo", lambda w: w.pop("model.layers.1.linear_attn.v_conv1d.weight"), r"conv1d\.weight of .* \(64, 1, 4\)"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, layout: str, change: Callable, message: str) -> None:
    folder = write_family(tmp_path, layout, head=False)
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    change(weights)
    for file in [*files, *folder.glob("*.index.json")]:
        file.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=message):
        treewy.load(folder, draft="none")


def test_a_head_of_single_experts_may_lack_some_without_drafts(tmp_path: Path) -> None:
    """Without drafts the head's tensors are not looked at; with them the missing one is named."""
    folder = write_family(tmp_path, "moe-multimodal-experts")
    weights = load_file(folder / "model.safetensors")
    del weights["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert treewy.load(folder, draft="none").generate([[3]], treewy.SamplingParams(max_new_tokens=2))
    with pytest.raises(RequestError, match=r"mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight should be \(24, 64\)"):
        treewy.load(folder)


def changed(model: PreTrainedModel, **entries: object) -> PreTrainedModel:
    """Return the model with another config, as if it had been loaded with it."""
    model = copy.deepcopy(model)
    for name, value in entries.items():
        setattr(model.model.config, name, value)
    return model


@pytest.mark.parametrize("name", ["moe", "next", "olmo"])
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, r"layer_types hold 'sliding_attention'"),
        ({"layer_types": ["chunked_attention"] + ["full_attention"] * 3}, r"layer_types hold 'chunked_attention'"),
        ({"sliding_window": 8}, r"sets sliding_window=8"),
        ({"sliding_window": 8, "use_sliding_window": True}, r"sets sliding_window=8"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, r"rope_type is 'longrope'"),
    ],
)
def test_attention_of_another_kind(families: Callable, name: str, entries: dict, message: str) -> None:
    """Fault G11: a window that slides over a tree's rows, or another kind, is never run as if it were plain attention."""
    with pytest.raises(UnsupportedError, match=message):
        HFTarget(changed(families(name)[1], **entries))


def test_a_window_that_is_not_used(families: Callable) -> None:
    """Qwen configs may name one and switch it off."""
    HFTarget(changed(families("moe")[1], sliding_window=4096, use_sliding_window=False))
    HFTarget(changed(families("moe")[1], sliding_window=None))


@pytest.mark.parametrize("layout", ["moe-multimodal", "next"])
def test_a_window_in_a_folder(tmp_path: Path, layout: str) -> None:
    """The config on disk, nested or flat, is what counts."""
    folder = write_family(tmp_path, layout, sliding_window=16)
    with pytest.raises(UnsupportedError, match="sliding_window=16"):
        treewy.load(folder)


def test_sliding_layers_in_a_folder(tmp_path: Path) -> None:
    """OLMo's decoder would run them as full attention under our masks."""
    folder = write_family(tmp_path, "olmo", layer_types=["linear_attention"] * 3 + ["sliding_attention"])
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder).config, OlmoHybridConfig)
    with pytest.raises(UnsupportedError, match="'sliding_attention'"):
        treewy.load(folder, draft="none")


def test_supported_types_are_the_registered_ones(families: Callable) -> None:
    assert SUPPORTED == tuple(FAMILIES) == ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
    assert {layout.text["model_type"] for layout in LAYOUTS.values()} | {"qwen3_5_text"} == set(SUPPORTED)
    with pytest.raises(UnsupportedError, match=r"qwen3_5_text, qwen3_5_moe_text, qwen3_next, olmo_hybrid; got 'qwen9'"):
        HFTarget(changed(families("moe")[1], model_type="qwen9"))
