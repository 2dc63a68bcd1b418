"""Where models come from: presets, folders and the hub, and what is said when they are not right."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file

from fixtures import TEXT_CONFIG, write_checkpoint
from treewy.errors import RequestError, UnsupportedError
from treewy.planner import ModelSpec, find_model
from treewy.planner.weights import counted, head_layers

HUB_ID = "someone/some-model"


def test_a_presets_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command means does not depend on where it runs; ./ means the folder."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "qwen3.5-2b")
    assert find_model("Qwen3.5-2B", "bfloat16").spec.hidden_size == 2048
    assert find_model("./qwen3.5-2b", "bfloat16").spec.hidden_size == TEXT_CONFIG["hidden_size"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3.5-35b", "Did you mean qwen3.5-35b-a3b"),
        ("zzz", "Choose one"),
        ("/nosuch/folder", "checkpoint folder"),
        ("a/b/c", "hub id"),
        ("~nosuchuser/x", "checkpoint folder"),
        ("x\0y", "checkpoint folder"),
        ("", "checkpoint folder"),
    ],
)
def test_a_name_that_is_nothing(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_model(name, "bfloat16")


def test_layers_by_interval(tmp_path: Path) -> None:
    """A config without layer_types says every how many layers attend."""
    config = {key: value for key, value in TEXT_CONFIG.items() if key != "layer_types"}
    spec = ModelSpec.from_config(config | {"num_hidden_layers": 7, "full_attention_interval": 3}, where="here")
    assert (spec.num_linear_layers, spec.num_attention_layers) == (5, 2)
    assert (spec.conv_width, spec.conv_channels) == (4, 2 * 2 * 16 + 4 * 16)


def test_a_head_is_whole_or_not_there() -> None:
    """Layers without the projection that joins them to the target are no head; indices are counted once."""
    layers = ["mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.down_proj.weight", "mtp.layers.1.x"]
    assert head_layers(layers) == 0
    assert head_layers([*layers, "mtp.fc.weight"]) == 2


def test_quantised_weights_keep_their_size(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    before = find_model(str(folder), "bfloat16").weights
    save_file({"model.layers.0.packed": torch.zeros(10, dtype=torch.int32)}, folder / "extra.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "extra.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    after = find_model(str(folder), "bfloat16").weights
    assert after.target == before.target + 40
    assert after.head == before.head


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_key_value_heads", 0),
        ("head_dim", -1),
        ("linear_conv_kernel_dim", True),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["sliding_attention"] * 4),
        ("layer_types", 4),
        ("mamba_ssm_dtype", "float3"),
        ("linear_num_value_heads", 3),
        ("mtp_num_hidden_layers", -1),
    ],
)
def test_a_config_with_a_bad_value(key: str, value: object) -> None:
    with pytest.raises(RequestError, match="config"):
        ModelSpec.from_config(TEXT_CONFIG | {key: value}, where="here")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"model_type": None},
        {"layer_types": ["full_attention"] * 4},
        {"num_experts": 4, "mlp_only_layers": [1]},
        {"num_experts": 4, "decoder_sparse_step": 2},
    ],
)
def test_a_model_that_is_no_such_hybrid(change: dict) -> None:
    with pytest.raises(UnsupportedError, match="here"):
        ModelSpec.from_config(TEXT_CONFIG | change, where="here")


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "must hold config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "readable JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "config.json").write_bytes(b"\x80"), "readable JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is not"),
        (lambda folder: truncate(folder / "model.safetensors", 4), "model.safetensors is not"),
        (lambda folder: truncate(folder / "model.safetensors", 500), "header is cut off"),
        (lambda folder: truncate(folder / "model.safetensors", -5), "tensors are cut off"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "is not"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "under weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'), "weight_map"),
    ],
)
def test_a_folder_that_is_broken(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = write_checkpoint(tmp_path)
    damage(folder)
    with pytest.raises(RequestError, match=said):
        find_model(str(folder), "bfloat16")


class Hub:
    """A hub with one model; it counts what is fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []

    def download(self, repo_id: str, filename: str) -> str:
        assert repo_id == HUB_ID
        self.fetched.append(filename)
        if not (self.folder / filename).is_file():
            raise EntryNotFoundError(f"no {filename}")
        return str(self.folder / filename)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(write_checkpoint(tmp_path, "multimodal", shards=2))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    return hub


def write_index(hub: Hub, metadata: object) -> None:
    file = hub.folder / "model.safetensors.index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metadata": metadata}))


def test_hub_with_an_index(hub: Hub) -> None:
    """Config and index, no weights; the index's total is taken as it is, the head's part counted."""
    write_index(hub, {"total_size": 1_000_000})
    source = find_model(HUB_ID, "bfloat16")
    head = counted(source.spec, "bfloat16").head
    assert hub.fetched == ["config.json", "model.safetensors.index.json"]
    assert source.weights[:2] == (1_000_000 - head, head)
    assert source.spec.num_head_layers == 1
    assert source.source == f"https://huggingface.co/{HUB_ID}/blob/main/config.json"


def test_hub_without_an_index(hub: Hub) -> None:
    (hub.folder / "model.safetensors.index.json").unlink()
    source = find_model(HUB_ID, "bfloat16")
    assert source.weights == counted(source.spec, "bfloat16")


@pytest.mark.parametrize("metadata", [{}, None, {"total_size": "big"}, {"total_size": 0}])
def test_hub_with_an_index_that_says_nothing(hub: Hub, metadata: object) -> None:
    write_index(hub, metadata)
    with pytest.raises(RequestError, match="total_size"):
        find_model(HUB_ID, "bfloat16")


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors.index.json"])
def test_hub_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """Offline, an index that cannot be had is not an index that is not there."""

    def download(repo_id: str, filename: str) -> str:
        if filename == gone:
            raise LocalEntryNotFoundError("cannot reach the hub")
        return hub.download(repo_id, filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(RequestError, match=f"{gone} of 'someone/some-model' could not be: cannot reach the hub"):
        find_model(HUB_ID, "bfloat16")


def test_hub_without_a_config(hub: Hub) -> None:
    (hub.folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"config\.json of"):
        find_model(HUB_ID, "bfloat16")


def test_out_of_reach_but_there_is_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, filename: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(RequestError, match=r"the preset qwen3\.5-35b-a3b"):
        find_model("Qwen/Qwen3.5-35B-A3B", "bfloat16")
