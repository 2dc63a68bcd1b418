"""From what a user names (a preset, a folder, a hub id) to a model's sizes and the bytes of its weights."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treewy.errors import RequestError
from treewy.planner import catalogue, weights
from treewy.planner.model import ModelSpec
from treewy.planner.weights import Weights

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A model to plan for, and where its figures come from."""

    name: str
    spec: ModelSpec
    weights: Weights
    source: str


def find_model(model: str, dtype: str) -> Source:
    """Return the sizes and weights of a preset, a checkpoint folder or a model on the hub.

    A preset's name wins over a folder of that name: write ./NAME for the folder.

    Args:
        model: What the user named.
        dtype: The dtype that weights are loaded in.

    Raises:
        RequestError: there is no such model, or its files cannot be read.
        UnsupportedError: it has no Gated DeltaNet layers.
    """
    if model.lower() in catalogue.model_names():
        preset = catalogue.model_preset(model.lower())
        return Source(preset.name, preset.spec, weights.counted(preset.spec, dtype), preset.source)
    folder = Path(model)
    with suppress(RuntimeError):  # ~nobody: no such home, so no such folder
        folder = folder.expanduser()
    if model and _is_folder(folder):
        return from_folder(folder, dtype)
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise catalogue.unknown(
            "A model", model, catalogue.model_names(), "or a checkpoint folder or a hub id owner/name"
        )
    return from_hub(model, dtype)


def from_folder(folder: Path, dtype: str) -> Source:
    """Return a checkpoint folder's model; its weight files are opened for their headers only."""
    spec = ModelSpec.from_config(_read_json(folder / CONFIG), where=str(folder))
    tensors: dict[str, weights.StoredTensor] = {}
    for name in _weight_files(folder):
        tensors |= weights.read_header(folder / name)
    spec = replace(spec, num_head_layers=weights.head_layers(tensors))
    return Source(str(folder), spec, weights.measured(tensors, dtype, tied=spec.tied), str(folder / CONFIG))


def from_hub(hub_id: str, dtype: str) -> Source:
    """Return a hub model, of which only the config and the weight index are fetched.

    The index gives one total, with whatever the files hold besides the text model, such as a vision tower. Without an
    index (a single weight file) weights are counted from the config.
    """
    config = _fetch(hub_id, CONFIG)
    assert config is not None
    spec = ModelSpec.from_config(_read_json(config), where=hub_id)
    where = f"https://huggingface.co/{hub_id}/blob/main/{CONFIG}"
    index_file = _fetch(hub_id, INDEX)
    if index_file is None:
        return Source(hub_id, spec, weights.counted(spec, dtype), where)
    index = _read_json(index_file)
    names = index.get("weight_map")
    total = (index.get("metadata") or {}).get("total_size")
    if not isinstance(names, dict) or not isinstance(total, (int, float)) or total <= 0:
        raise RequestError(
            f"A weight index must give weight_map and a positive metadata.total_size; {INDEX} of {hub_id} does not. "
            "Download the checkpoint and pass its folder."
        )
    spec = replace(spec, num_head_layers=weights.head_layers(names))
    head = min(weights.counted(spec, dtype).head, int(total))
    return Source(hub_id, spec, Weights(int(total) - head, head, f"total_size of {INDEX}, all its tensors"), where)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or with a zero byte
        return False


def _weight_files(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return [SINGLE]
    weight_map = _read_json(folder / INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"A weight index must map names to files under weight_map; {folder / INDEX} does not. Download it again."
        )
    return sorted(set(names))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(
            f"A checkpoint must hold {file.name}; {file.parent} does not. Point at the folder itself."
        ) from error
    except (OSError, ValueError) as error:
        raise RequestError(f"{file.name} must be readable JSON; {file} is not: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise RequestError(
            f"{file.name} must hold a JSON object; {file} holds a {type(content).__name__}. Download it again."
        )
    return content


def _fetch(hub_id: str, name: str) -> Path | None:
    """Return a hub model's file, fetched or from the local cache; None if the model has no such index."""
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, name))
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError, OSError) as error:
        # Offline, a missing file and an unreachable hub look alike: only the hub's own answer says "no such file".
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if absent and name == INDEX:
            return None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        presets = [x for x in catalogue.model_names() if catalogue.model_preset(x).hub_id.lower() == hub_id.lower()]
        instead = f"pass a local folder or the preset {presets[0]}" if presets else "pass a local folder"
        raise RequestError(
            f"A hub id must name a model that can be fetched; {name} of {hub_id!r} could not be: {reason}. "
            f"Check the id and the network, or {instead}."
        ) from error
