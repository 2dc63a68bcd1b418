"""Reading a checkpoint folder: resolved, checked whole, and every foreign error mapped here."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError, UnsupportedError
from treewy.hf import experts
from treewy.hf.mtp import MARKER, PREFIX
from treewy.shapes import Tensor

SHIPPED = Path(__file__).parent.parent / "assets" / "checkpoint"
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")


def resolve(model: str | Path | None) -> Path:
    """Return the local folder of a checkpoint: the shipped one for None, a folder, or a hub id's snapshot.

    Raises:
        RequestError: there is no such folder, and no such model can be fetched.
    """
    if model is None:
        return SHIPPED
    folder = Path(model)
    with suppress(RuntimeError):  # ~nobody: no such home, so no such folder
        folder = folder.expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        raise RequestError(
            f"A model must be a checkpoint folder or a hub id of the form owner/name; {str(model)!r} is neither. "
            "Check the path."
        )
    return _snapshot(str(model))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer.

    Raises:
        RequestError: there is none, or it cannot be read.
    """
    # transformers would make an empty one, which turns every text into none.
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise RequestError(
            f"A checkpoint must hold its tokenizer; {folder} has none of {', '.join(TOKENIZERS)}. Download it again."
        )
    _read_json(folder, CONFIG)
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(folder))
    except Exception as error:
        raise _unreadable(folder, "tokenizer", error) from error


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Return the folder's causal language model, in eval mode, every weight accounted for.

    Raises:
        RequestError: a file is missing, truncated or does not fit the config; weights are missing or surplus.
        UnsupportedError: transformers has no causal model for the config.
    """
    _check_experts(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model, info = loaded
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"The checkpoint must be of a type transformers can load as a causal model; {folder} is not: "
            f"{_first_line(error)} Upgrade transformers or use another checkpoint."
        ) from error
    except Exception as error:
        raise _unreadable(folder, "model", error) from error
    if info["mismatched_keys"]:
        name, given, expected = sorted(info["mismatched_keys"])[0]
        raise RequestError(
            f"A checkpoint's weights must fit its config; {name} of {folder} is {tuple(given)} and should be {tuple(expected)}."
            " Use the config the weights were saved with."
        )
    _refuse_missing(folder, info["missing_keys"])
    if info["unexpected_keys"]:
        surplus = sorted(info["unexpected_keys"])
        raise RequestError(
            f"A checkpoint must hold no weights that its model has no place for; {folder} holds {surplus[0]} and "
            f"{len(surplus) - 1} more. Use the config the weights were saved with."
        )
    return model.to(device).eval()


def load_mtp_weights(folder: Path) -> dict[str, Tensor] | None:
    """Return the `mtp.*` tensors, or None if the checkpoint has no head. The weight files decide, not the config."""
    weights: dict[str, Tensor] = {}
    for file in shards(folder):
        with safe_open(file, framework="pt") as shard:
            weights |= {name: shard.get_tensor(name) for name in shard.keys() if name.startswith(PREFIX)}  # noqa: SIM118
    return weights if MARKER in weights else None


def shards(folder: Path) -> list[Path]:
    """Return the folder's weight files, each opened once to see that it is whole.

    Raises:
        RequestError: one is missing or truncated, or the folder holds none.
    """
    _read_json(folder, CONFIG)
    names = _shard_names(folder)
    for name in names:
        if not (folder / name).is_file():
            raise RequestError(
                f"A checkpoint must hold its weight files; {folder / name} is missing. Download it again."
            )
        try:
            with safe_open(folder / name, framework="pt") as shard:
                shard.keys()
        except (SafetensorError, OSError) as error:
            raise _unreadable(folder, name, error) from error
    return [folder / name for name in names]


def _check_experts(folder: Path) -> None:
    """Transformers joins single experts itself, but says little of what is wrong, and nothing of a mixture held twice."""
    names: set[str] = set()
    for file in shards(folder):
        with safe_open(file, framework="pt") as shard:
            names.update(name for name in shard.keys() if not name.startswith(PREFIX))  # noqa: SIM118
    _refuse_missing(folder, experts.incomplete(names))
    if doubled := experts.doubled(names):
        raise RequestError(
            f"A checkpoint must hold its experts fused or one by one; {folder} holds {doubled[0]} and single experts as "
            "well. Keep one of the two."
        )


def _refuse_missing(folder: Path, names: Iterable[str]) -> None:
    missing = sorted(names)
    if missing:
        raise RequestError(
            f"A checkpoint must hold every weight of its model; {folder} lacks {missing[0]} and {len(missing) - 1} more. "
            "Download it again."
        )


def _shard_names(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return [SINGLE]
    weight_map = _read_json(folder, INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"A weight index must map names to files under weight_map; {folder / INDEX} does not. Download it again."
        )
    return sorted(set(names))


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise RequestError(f"A checkpoint folder must hold {name}; {folder} does not. Point at the folder itself.")
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(folder, name, error) from error
    if not isinstance(content, dict):
        raise RequestError(
            f"{name} must hold a JSON object; that of {folder} holds a {type(content).__name__}. Download it again."
        )
    return content


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise RequestError(
            f"A hub id must name a model that can be fetched; {hub_id!r} could not be: {_first_line(error)} "
            "Check the id and the network, or pass a local folder."
        ) from error


def _unreadable(folder: Path, what: str, error: Exception) -> RequestError:
    return RequestError(
        f"A checkpoint's files must be whole and readable; {what} of {folder} is not: {_first_line(error)} "
        "Download it again."
    )


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if text.endswith(".") else f"{text}."
