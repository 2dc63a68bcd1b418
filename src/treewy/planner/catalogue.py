"""Presets: models and GPUs as data files, each with its source."""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import Any

from treewy.errors import RequestError
from treewy.planner.model import ModelSpec

GIB = 1 << 30
_FOLDER = files("treewy.planner") / "presets"
_SUFFIX = ".toml"


@dataclass(frozen=True)
class Preset:
    """A published model: its sizes, and where they come from; `config` has those of its config.json that memory depends on."""

    name: str
    hub_id: str
    source: str
    spec: ModelSpec
    config: dict[str, Any]


@dataclass(frozen=True)
class GPU:
    """A device's memory and its bandwidth; of a bare amount of memory the bandwidth is unknown."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: int | None
    source: str


def model_names() -> list[str]:
    """Return the names of the model presets, small models first."""
    names = [file.name.removesuffix(_SUFFIX) for file in (_FOLDER / "models").iterdir() if file.name.endswith(_SUFFIX)]
    return sorted(names, key=lambda name: (name.split("-")[0], float(name.split("b")[0].split("-")[-1]), name))


@cache
def model_preset(name: str) -> Preset:
    """Return the model preset called `name`.

    Raises:
        RequestError: there is none of that name.
    """
    if name not in model_names():
        raise unknown("A model preset", name, model_names())
    content = tomllib.loads((_FOLDER / "models" / f"{name}{_SUFFIX}").read_text(encoding="utf-8"))
    spec = ModelSpec.from_config(content["config"], where=f"preset {name}")
    if "head_layers" in content:
        spec = replace(spec, num_head_layers=content["head_layers"])
    return Preset(name, content["hub_id"], content["source"], spec, content["config"])


@cache
def _gpus() -> dict[str, GPU]:
    content: dict[str, dict[str, Any]] = tomllib.loads((_FOLDER / "gpus.toml").read_text(encoding="utf-8"))
    return {
        name: GPU(name, entry["memory_mib"] << 20, int(entry["bandwidth_gb_per_s"] * 10**9), entry["source"])
        for name, entry in content.items()
    }


def gpu_names() -> list[str]:
    """Return the names of the GPU presets."""
    return list(_gpus())


def find_gpu(name: str) -> GPU:
    """Return the GPU preset called `name`, or a device with `name` GiB of memory.

    Raises:
        RequestError: it is neither.
    """
    gpus = _gpus()
    if name.lower() in gpus:
        return gpus[name.lower()]
    try:
        gib = float(name)
    except ValueError:
        raise unknown("A GPU", name, gpu_names(), "or a number of GiB") from None
    if not (isfinite(gib) and 0 < gib <= 1 << 20):
        raise RequestError(f"A GPU's memory must be a positive number of GiB; got {name}. Give one, as in 80.")
    return GPU(f"{gib:g} GiB", int(gib * GIB), None, "as given")


def unknown(what: str, name: str, known: Iterable[str], otherwise: str = "") -> RequestError:
    """Return the error for a name that is not known, with the closest one that is."""
    known = list(known)
    begun = [candidate for candidate in known if name and candidate.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}?" if close else "Choose one of them."
    also = f" {otherwise}" if otherwise else ""
    return RequestError(f"{what} must be one of {', '.join(known)}{also}; got {name!r}. {hint}")
