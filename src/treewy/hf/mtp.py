"""The multi-token-prediction head of a Qwen3.5 or Qwen3-Next checkpoint, built from the model's own layer classes."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treewy.cache import AttentionSpec
from treewy.draft.mtp import Attends, MTPHead
from treewy.errors import RequestError
from treewy.hf import experts
from treewy.hf.attach import STEP_ARGUMENT, attached
from treewy.hf.families import check_head, family_of
from treewy.hf.target import attention_spec, text_model
from treewy.shapes import Float, Int, Tensor

PREFIX = "mtp."
MARKER = "mtp.fc.weight"


class HFMTPHead(MTPHead):
    """`x = fc(cat[norm_e(embed(token)), norm_h(hidden)])`, one full-attention layer, a final norm.

    Embedding first. The embedding, the rotary tables and the LM head are the target's; the head owns `mtp.*` only.

    Source: eq. 12 of docs/theory.md.

    Args:
        model: The target.
        weights: The checkpoint's `mtp.*` tensors by their full names; experts fused or one by one.

    Raises:
        UnsupportedError: models of this type have no head.
        RequestError: tensors are missing, surplus or of the wrong shape.
    """

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
        self.text, self.lm_head = text_model(model), model.lm_head
        check_head(self.text.config)
        self._rope_axes = family_of(self.text.config).rope_axes
        weight = self.text.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.module = _Module(self.text, _num_layers(weights)).to(self.device, self.dtype).eval().requires_grad_(False)
        _fill(self.module, weights)

    def layer_specs(self) -> Sequence[AttentionSpec]:
        """See `MTPHead.layer_specs`."""
        return [attention_spec(layer) for layer in self.module.layers]

    @torch.no_grad()
    def forward(
        self,
        tokens: Int[Tensor, "R"],
        hidden: Float[Tensor, "R hidden"],
        positions: Int[Tensor, "R"],
        step: Attends,
    ) -> Float[Tensor, "R hidden"]:
        """See `MTPHead.forward`."""
        m: Any = self.module
        embedded = m.pre_fc_norm_embedding(self.text.embed_tokens(tokens))
        x = m.fc(torch.cat([embedded, m.pre_fc_norm_hidden(hidden)], dim=-1))[None]
        rotary = self.text.rotary_emb(x, positions.expand(*self._rope_axes, 1, -1))
        with attached(m.layers, m.config):
            for layer in m.layers:
                x = layer(x, position_embeddings=rotary, **{STEP_ARGUMENT: step})
        return m.norm(x)[0]

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """See `MTPHead.logits`."""
        return self.lm_head(hidden)


class _Module(nn.Module):
    """The head's own parameters, under the names the checkpoint gives them."""

    def __init__(self, text: Any, num_layers: int) -> None:
        super().__init__()
        self.config: Any = copy.deepcopy(text.config)
        self.config.layer_types = ["full_attention"] * num_layers
        layer_class, norm_class = type(text.layers[0]), type(text.norm)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm_class(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm_class(hidden, eps=eps)
        self.layers = nn.ModuleList(layer_class(self.config, index) for index in range(num_layers))
        self.norm = norm_class(hidden, eps=eps)


def _num_layers(weights: Mapping[str, Tensor]) -> int:
    parts = [name.split(".")[2] for name in weights if name.startswith("mtp.layers.")]
    indices = {int(part) for part in parts if part.isdecimal()}
    if MARKER not in weights or not indices:
        raise RequestError(
            f"A multi-token-prediction head must hold {MARKER} and mtp.layers.*; got {len(weights)} mtp tensors. "
            "Use a checkpoint with its head, or decode with draft='none'."
        )
    return max(indices) + 1


def _fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    expected = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    if experts.any_single(own):
        expected = experts.single_shapes(expected)
    given = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if expected != given:
        wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
        raise RequestError(
            f"The head's tensors must fit the model; {PREFIX}{wrong[0]} should be {expected.get(wrong[0], 'absent')} and is "
            f"{given.get(wrong[0], 'absent')} ({len(wrong)} differ). Use the head that was trained with this model."
        )
    module.load_state_dict(experts.fused(own))
