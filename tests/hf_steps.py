"""Stock transformers, asked plainly: whole sequences through the model's own forward, no cache."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from treewy.engine.lossless import Reference
from treewy.hf.stock import stock_generate


class Forward(NamedTuple):
    """Logits and final hidden states of one sequence."""

    logits: torch.Tensor
    hidden: torch.Tensor


@torch.no_grad()
def forward(model: PreTrainedModel, tokens: Sequence[int]) -> Forward:
    """Run one whole sequence."""
    hidden = model.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
    return Forward(model.lm_head(hidden), hidden)


def continuation(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the prompt and what `model.generate` adds to it, end-of-text ignored."""
    return [*prompt, *stock_generate(model, prompt, num_tokens).token_ids]


def stock_reference(model: PreTrainedModel):
    """Return the undrafted decoder for `compare_decoders`: tokens of `model.generate`, gaps of the full forward."""

    def decode(prompt: list[int], num_tokens: int) -> Reference:
        script = continuation(model, prompt, num_tokens)
        top = forward(model, script[:-1]).logits[len(prompt) - 1 :].topk(2).values
        return Reference(script[len(prompt) :], (top[:, 0] - top[:, 1]).tolist())

    return decode


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root-mean-square difference over the root-mean-square value."""
    return float((got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt())


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return everything of the model that a borrower might leave changed."""
    parameters = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        parameters.update(name.encode() + tensor.numpy().tobytes())
    return {
        "parameters": parameters.hexdigest(),
        "pointers": [p.data_ptr() for p in model.parameters()],
        "gradients": [p.requires_grad for p in model.parameters()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "forwards": {name: vars(module).get("forward") for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attention": {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        "config": model.config.to_json_string(),
        "generation": model.generation_config.to_json_string(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }
