"""From a checkpoint to an engine."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from treewy.cache import get_policy
from treewy.draft import Drafter, ModelDrafter, MTPDrafter, NgramDrafter, NoDrafter, Shape
from treewy.engine import Engine, SamplingParams
from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError, UnsupportedError
from treewy.hf.checkpoint import load_model, load_mtp_weights, load_tokenizer, resolve
from treewy.hf.families import check_head
from treewy.hf.mtp import HFMTPHead
from treewy.hf.target import HFTarget, text_model
from treewy.tree import DraftTree

DRAFTERS = ("mtp", "ngram", "model", "none")


def load(
    model: str | Path | None = None,
    *,
    draft: str = "mtp",
    draft_model: str | Path | None = None,
    shape: Shape | None = None,
    commit: str = "reconstruct",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    max_num_seqs: int = 8,
) -> Engine:
    """Return an engine over a checkpoint.

    Args:
        model: A folder or hub id; None for the small trained checkpoint that ships with treewy.
        draft: "mtp", "ngram", "model" or "none".
        draft_model: Folder or hub id of the model that drafts, for draft "model".
        shape: Draft shape or budget; default a chain of 3.
        commit: "store_all", "reconstruct" or "ring".
        dtype: Default: bfloat16 on a GPU, float32 on a CPU.
        device: Default: the GPU if there is one.
        max_num_seqs: Requests decoded at once.

    Raises:
        RequestError: a checkpoint cannot be read, has no head to draft with, or has other tokens than the target.
        UnsupportedError: the model's type is not supported.
    """
    check_draft(draft, has_model=draft_model is not None)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # Refuse before minutes of loading.
    get_policy(commit)
    SamplingParams(shape=shape)
    folder = resolve(model)
    hf_model, tokenizer = load_model(folder, resolve_dtype(dtype, device), device), load_tokenizer(folder)
    return build_engine(
        hf_model,
        draft=draft,
        folder=folder,
        draft_model=None if draft_model is None else load_draft_model(draft_model, hf_model, tokenizer),
        shape=shape,
        commit=commit,
        tokenizer=tokenizer,
        max_num_seqs=max_num_seqs,
    )


def build_engine(
    model: PreTrainedModel,
    *,
    draft: str,
    folder: Path | None,
    draft_model: PreTrainedModel | None = None,
    shape: Shape | None = None,
    commit: str = "reconstruct",
    tokenizer: Tokenizer | None = None,
    max_num_seqs: int = 8,
) -> Engine:
    """Return an engine over a model that is already in memory; the model stays the caller's.

    Args:
        folder: Where the head's weights are, for draft "mtp".
        draft_model: The model that drafts, for draft "model".
    """
    return Engine(
        HFTarget(model),
        build_drafter(model, draft, folder, max_num_seqs, draft_model),
        shape=shape or DraftTree.chain(3),
        commit=commit,
        tokenizer=tokenizer,
        eos_ids=eos_ids(model),
        max_num_seqs=max_num_seqs,
    )


def build_drafter(
    model: PreTrainedModel, draft: str, folder: Path | None, num_slots: int, draft_model: PreTrainedModel | None = None
) -> Drafter:
    """Return the drafter called `draft` for `model`."""
    check_draft(draft, has_model=draft_model is not None)
    if draft_model is not None:
        return ModelDrafter(HFTarget(draft_model), num_slots, vocab_size=HFTarget(model).vocab_size)
    if draft == "none":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter()
    check_head(text_model(model).config)
    weights = None if folder is None else load_mtp_weights(folder)
    if weights is None:
        raise RequestError(
            f"Drafting with mtp needs a checkpoint that holds mtp.fc.weight; {folder} does not. "
            "Use a checkpoint with its head, or draft 'none'."
        )
    return MTPDrafter(HFMTPHead(model, weights), num_slots)


def check_draft(draft: str, *, has_model: bool) -> None:
    """Refuse a drafter that is not known, one that lacks its model, and a model that would be left unused.

    Raises:
        UnsupportedError: the name is unknown.
        RequestError: "model" comes without a draft model, or another drafter with one.
    """
    if draft not in DRAFTERS:
        raise UnsupportedError(f"A drafter must be one of {', '.join(DRAFTERS)}; got {draft!r}. Choose one of them.")
    if draft == "model" and not has_model:
        raise RequestError("Draft 'model' needs a model to draft with; got none. Pass draft_model=.")
    if draft != "model" and has_model:
        raise RequestError(
            f"A draft model is for draft 'model' only; got one with draft {draft!r}. Drop it, or draft with it."
        )


def load_draft_model(source: str | Path, model: PreTrainedModel, tokenizer: Tokenizer | None) -> PreTrainedModel:
    """Return a checkpoint's model to draft for `model`, of its dtype and on its device.

    Args:
        source: Folder or hub id.
        model: The target.
        tokenizer: The target's; None leaves only the size of the vocabulary to compare.

    Raises:
        RequestError: the checkpoint cannot be read, or its tokens are not the target's.
    """
    folder = resolve(source)
    if tokenizer is not None and _token_ids(load_tokenizer(folder)) != _token_ids(tokenizer):
        raise RequestError(
            f"A draft model must have the target's tokens; those of {folder} are others. "
            "Use a smaller model of the target's family."
        )
    weight = text_model(model).embed_tokens.weight
    return load_model(folder, weight.dtype, weight.device)


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return cast(Any, tokenizer).get_vocab()


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
