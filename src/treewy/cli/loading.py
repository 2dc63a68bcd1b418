"""What every command that runs a model does first: device, dtype, checkpoint, threads."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treewy.cli.terminal import status
from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError
from treewy.hf.checkpoint import load_model, load_tokenizer, resolve
from treewy.hf.load import load_draft_model, resolve_dtype


class Loaded(NamedTuple):
    """A checkpoint in memory."""

    folder: Path
    model: PreTrainedModel
    tokenizer: Tokenizer


def load_checkpoint(model: str | None, dtype: str, device: str) -> Loaded:
    """Load what `--model`, `--dtype` and `--device` mean, saying so on a terminal.

    Raises:
        RequestError: one of them means nothing here.
    """
    place = resolve_device(device)
    wanted = resolve_dtype(None if dtype == "auto" else dtype, place)
    _quieten_transformers()
    with status("loading the model"):
        folder = resolve(model)
        tokenizer = load_tokenizer(folder)
        loaded = load_model(folder, wanted, place)
    _settle_threads(loaded, place)
    return Loaded(folder, loaded, tokenizer)


def open_draft_model(source: str | None, model: PreTrainedModel, tokenizer: Tokenizer) -> PreTrainedModel | None:
    """Load what `--draft-model` names, to draft for `model`; None if it names nothing."""
    if source is None:
        return None
    with status("loading the draft model"):
        return load_draft_model(source, model, tokenizer)


def resolve_device(name: str) -> torch.device:
    """Return the device meant by `--device`.

    Raises:
        RequestError: the name is unknown, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RequestError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}. Choose one of them.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"A CUDA device must be there to be used; got {name!r} and {torch.cuda.device_count()} devices. Use cpu."
        )
    return device


# Below this many parameters, products are too small to share: more threads only wait for each other, and on a busy
# machine starve (seen on 2 cores: idle 95 tokens/s with one thread against 113, busy 105 against 35).
SMALL_MODEL = 32_000_000


def _settle_threads(model: PreTrainedModel, device: torch.device) -> None:
    """Run small models on one CPU thread, unless OMP_NUM_THREADS says otherwise."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)


def _quieten_transformers() -> None:
    """Keep transformers' notes and bars off stderr: the command line says itself what it is doing."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
