"""The Target port over a transformers causal language model."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from treewy.cache import AttentionSpec, Batch, CachePool, LayerSpec, LinearSpec
from treewy.errors import RequestError, UnsupportedError
from treewy.hf.attach import STEP_ARGUMENT, attached
from treewy.hf.families import family_of
from treewy.model import Target, Verified


class HFTarget(Target):
    """Runs a checkpoint's own transformers code on packed rows; holds no second copy of any weight.

    The model is only borrowed: between calls it is exactly as it was given.

    Args:
        model: A causal language model of a supported type, in eval mode.

    Raises:
        UnsupportedError: the model's type has no mixer here, or its config asks for layers that are not supported.
        RequestError: the model is in training mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.text = model, text_model(model)
        self.config = self.text.config
        family_of(self.config)
        if model.training:
            raise RequestError(
                "The model must be in eval mode, or dropout would act; it is training. Call model.eval()."
            )
        self.vocab_size, self.max_len = self.config.vocab_size, self.config.max_position_embeddings
        weight = self.text.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.state_dtype = state_dtype(self.config)

    def layer_specs(self) -> Sequence[LayerSpec]:
        """See `Target.layer_specs`."""
        return [_layer_spec(layer) for layer in self.text.layers]

    @torch.no_grad()
    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        """See `Target.verify`."""
        step = cache.begin(batch.tree, batch.slots, batch.policy)
        with attached(self.text.layers, self.config):
            output = self.text(
                input_ids=batch.tokens[None],
                position_ids=step.positions[None],
                # One entry per layer kind, and no mask to build: the step knows the trees.
                attention_mask=dict.fromkeys(set(self.config.layer_types)),
                use_cache=False,
                **{STEP_ARGUMENT: step},
            )
        hidden = output.last_hidden_state[0]
        asked = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        return Verified(self.model.lm_head(asked), hidden, step.pending())


def text_model(model: PreTrainedModel) -> Any:
    """Return the text decoder of a causal or multimodal model."""
    inner = getattr(model, "model", None)
    text = getattr(inner, "language_model", inner)
    if text is None or not hasattr(text, "layers") or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"The model must be a causal language model with decoder layers and an lm_head; got {type(model).__name__}. "
            "Load it with AutoModelForCausalLM."
        )
    return text


def state_dtype(config: object) -> torch.dtype:
    """Return the dtype the checkpoint asks for its recurrent states; float32 unless it says otherwise."""
    name = getattr(config, "mamba_ssm_dtype", None) or "float32"
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise UnsupportedError(
            f"Recurrent states must be float32 or bfloat16; the config's mamba_ssm_dtype is {name!r}. Mend the config."
        )
    return dtype


def _layer_spec(layer: Any) -> LayerSpec:
    if hasattr(layer, "linear_attn"):
        mixer = layer.linear_attn
        return LinearSpec(
            num_key_heads=mixer.num_k_heads,
            num_value_heads=mixer.num_v_heads,
            value_dim=mixer.head_v_dim,
            key_dim=mixer.head_k_dim,
            conv_channels=mixer.conv_dim,
            conv_width=mixer.conv_kernel_size,
        )
    return attention_spec(layer)


def attention_spec(layer: Any) -> AttentionSpec:
    """Return the memory that a decoder layer's softmax attention needs."""
    attention = layer.self_attn
    return AttentionSpec(attention.k_proj.out_features // attention.head_dim, attention.head_dim)
