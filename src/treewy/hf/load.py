"""From a checkpoint to an engine."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from treewy.draft import Drafter, MTPDrafter, NoDrafter
from treewy.engine import Engine
from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError, UnsupportedError
from treewy.hf.checkpoint import load_model, load_mtp_weights, load_tokenizer, resolve
from treewy.hf.families import check_head
from treewy.hf.mtp import HFMTPHead
from treewy.hf.target import HFTarget, text_model
from treewy.tree import DraftTree

DRAFTERS = ("mtp", "none")


def load(
    model: str | Path | None = None,
    *,
    draft: str = "mtp",
    shape: DraftTree | None = None,
    commit: str = "reconstruct",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    max_num_seqs: int = 8,
) -> Engine:
    """Return an engine over a checkpoint.

    Args:
        model: A folder or hub id; None for the small trained checkpoint that ships with treewy.
        draft: "mtp" or "none".
        shape: Draft shape; default a chain of 3.
        commit: "store_all", "reconstruct" or "ring".
        dtype: Default: bfloat16 on a GPU, float32 on a CPU.
        device: Default: the GPU if there is one.
        max_num_seqs: Requests decoded at once.

    Raises:
        RequestError: the checkpoint cannot be read, or has no head to draft with.
        UnsupportedError: the model's type is not supported.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = resolve(model)
    hf_model = load_model(folder, resolve_dtype(dtype, device), device)
    return build_engine(
        hf_model,
        draft=draft,
        folder=folder,
        shape=shape,
        commit=commit,
        tokenizer=load_tokenizer(folder),
        max_num_seqs=max_num_seqs,
    )


def build_engine(
    model: PreTrainedModel,
    *,
    draft: str,
    folder: Path | None,
    shape: DraftTree | None = None,
    commit: str = "reconstruct",
    tokenizer: Tokenizer | None = None,
    max_num_seqs: int = 8,
) -> Engine:
    """Return an engine over a model that is already in memory; the model stays the caller's.

    Args:
        folder: Where the head's weights are, for draft "mtp".
    """
    return Engine(
        HFTarget(model),
        build_drafter(model, draft, folder, max_num_seqs),
        shape=shape or DraftTree.chain(3),
        commit=commit,
        tokenizer=tokenizer,
        eos_ids=eos_ids(model),
        max_num_seqs=max_num_seqs,
    )


def build_drafter(model: PreTrainedModel, draft: str, folder: Path | None, num_slots: int) -> Drafter:
    """Return the drafter called `draft` for `model`."""
    if draft not in DRAFTERS:
        raise UnsupportedError(f"A drafter must be one of {', '.join(DRAFTERS)}; got {draft!r}. Choose one of them.")
    if draft == "none":
        return NoDrafter()
    check_head(text_model(model).config)
    weights = None if folder is None else load_mtp_weights(folder)
    if weights is None:
        raise RequestError(
            f"Drafting with mtp needs a checkpoint that holds mtp.fc.weight; {folder} does not. "
            "Use a checkpoint with its head, or draft 'none'."
        )
    return MTPDrafter(HFMTPHead(model, weights), num_slots)


def eos_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a text: the generation config's, else the config's."""
    for config in (model.generation_config, model.config, getattr(model.config, "text_config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Return the dtype meant: by name, or the device's default."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str):
        names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        if dtype not in names:
            raise RequestError(f"dtype must be one of {', '.join(names)}; got {dtype!r}. Choose one of them.")
        return names[dtype]
    return dtype
