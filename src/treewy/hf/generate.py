"""Drafted decoding for a model the caller already has."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from treewy.draft import Shape
from treewy.engine import SamplingParams
from treewy.engine.request import check_finite
from treewy.errors import RequestError, ShapeError, UnsupportedError
from treewy.hf.checkpoint import resolve
from treewy.hf.families import check_head
from treewy.hf.load import build_engine, check_draft, eos_ids, load_draft_model
from treewy.hf.target import text_model
from treewy.shapes import Int, Tensor


def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B prompt"],
    *,
    attention_mask: Int[Tensor, "B prompt"] | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    drafts: str = "sampled",
    draft: str = "mtp",
    checkpoint: str | Path | None = None,
    draft_model: PreTrainedModel | str | Path | None = None,
    shape: Shape | None = None,
    commit: str = "reconstruct",
    ignore_eos: bool = False,
) -> Int[Tensor, "B total"]:
    """Decode with drafts, as `model.generate` does without: same tokens, or at a temperature the same law; same layout.

    The model is borrowed: its weights, forwards and attention implementation are as they were, also after an
    exception. Calls from several threads take turns; a plain forward of the same model in another thread at the same
    time is not safe. Sampling settings of the model's generation config are not looked at: the arguments decide.

    Args:
        model: A causal language model of a supported type, in eval mode.
        input_ids: Prompts, padded on the left if their lengths differ.
        attention_mask: 0 where `input_ids` is padding; None if nothing is.
        max_new_tokens: Most tokens to generate per prompt.
        temperature: 0 decodes greedily; above it, tokens are sampled.
        top_k, top_p, min_p: Which tokens can be sampled (see `treewy.SamplingParams`).
        seed: Of sampling; prompt i uses `seed` + i. None takes fresh ones.
        drafts: At a temperature, "sampled" or "argmax" (see `treewy.SamplingParams`).
        draft: "mtp", "ngram", "model" or "none".
        checkpoint: Folder or hub id whose files hold the head's `mtp.*` tensors; default: where the model was loaded
            from.
        draft_model: For draft "model": the model that drafts, its folder or its hub id. Its tokens must be the model's.
        shape: Draft shape or budget; default a chain of 3.
        commit: "store_all", "reconstruct" or "ring".
        ignore_eos: Go on past the end-of-text token.

    Returns:
        Prompts and new tokens; prompts that ended early are padded on the right.
    """
    if input_ids.ndim != 2:
        raise ShapeError(f"input_ids must be [batch, prompt]; got shape {tuple(input_ids.shape)}. Add a batch axis.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ShapeError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}; got {tuple(mask.shape)}. "
            "Pass the tokenizer's own."
        )
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ShapeError("Padding must be on the left; attention_mask has zeros after ones. Set padding_side='left'.")
    _refuse_penalties(model)
    check_draft(draft, has_model=draft_model is not None)
    if isinstance(draft_model, (str, Path)):
        draft_model = load_draft_model(draft_model, model, tokenizer=None)
    engine = build_engine(
        model,
        draft=draft,
        folder=_head_folder(model, checkpoint) if draft == "mtp" else None,
        draft_model=draft_model,
        shape=shape,
        commit=commit,
        max_num_seqs=max(1, input_ids.shape[0]),
    )
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    params = [
        SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=None if seed is None else seed + place,
            drafts=drafts,
            ignore_eos=ignore_eos,
        )
        for place in range(len(prompts))
    ]
    generations = engine.generate(prompts, params)
    for generation in generations:
        check_finite(generation)
    new = [generation.token_ids for generation in generations]
    return torch.cat([input_ids, _padded(new, _pad_id(model)).to(input_ids)], dim=1)


# What a generation config may ask of `model.generate` that changes greedy tokens and is not supported here.
_UNSUPPORTED = (
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "min_length",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "guidance_scale",
)


def _refuse_penalties(model: PreTrainedModel) -> None:
    config = model.generation_config
    asked = [name for name in _UNSUPPORTED if getattr(config, name, None) not in (None, 0, 1.0)]
    asked += ["repetition_penalty"] if (getattr(config, "repetition_penalty", None) or 1.0) != 1.0 else []
    asked += ["num_beams"] if (getattr(config, "num_beams", None) or 1) > 1 else []
    if asked:
        raise UnsupportedError(
            f"Decoding takes no penalties or constraints; the model's generation config sets {asked[0]}="
            f"{getattr(config, asked[0])!r}. Unset it, or use model.generate."
        )


def _head_folder(model: PreTrainedModel, checkpoint: str | Path | None) -> Path:
    check_head(text_model(model).config)
    source = checkpoint or str(model.config.name_or_path)
    if not source:
        raise RequestError(
            "Drafting with mtp needs a checkpoint that holds mtp.fc.weight; this model was not loaded from one. "
            "Pass checkpoint=, or draft 'none'."
        )
    return resolve(source)


def _padded(rows: list[list[int]], pad: int) -> Int[Tensor, "B new"]:
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows], dtype=torch.int64).reshape(len(rows), width)


def _pad_id(model: PreTrainedModel) -> int:
    pad = getattr(model.generation_config, "pad_token_id", None)
    return pad if pad is not None else next(iter(eos_ids(model)), 0)
