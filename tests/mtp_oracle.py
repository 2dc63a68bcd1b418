"""The multi-token-prediction head as transformers writes it: its generic `MtpLayer`, loaded with the checkpoint's tensors."""

import copy
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from treewy.tree import DraftTree

NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "post_norm.",
    "mtp.layers.0.": "mtp_block.",
}


class MTPOracle:
    """Runs rows of (token, hidden state) as one causal chain, by eager attention with a plain triangular mask.

    Args:
        model: The target.
        weights: `mtp.*` tensors; experts fused.
        layer_class: The model's decoder layer.
        norm_class: Its norm.
        rope_axes: Leading axes of the positions its rotary tables take.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Mapping[str, torch.Tensor],
        layer_class: type = Qwen3_5DecoderLayer,
        norm_class: type = Qwen3_5RMSNorm,
        rope_axes: tuple[int, ...] = (3,),
    ) -> None:
        self.model, self.rope_axes = model, rope_axes
        config = copy.deepcopy(model.config)
        config.layer_types, config._attn_implementation, config._experts_implementation = (
            ["full_attention"],
            "eager",
            "eager",
        )
        self.layer = MtpLayer(config, layer_class, norm_class, 0).eval()
        renamed = {}
        for name, tensor in weights.items():
            prefix = next(prefix for prefix in NAMES if name.startswith(prefix))
            renamed[NAMES[prefix] + name.removeprefix(prefix)] = tensor
        self.layer.load_state_dict(renamed)

    @torch.no_grad()
    def chain(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return every row's output. Positions are one higher than the drafter's: under rope that is the same."""
        embedded = self.model.model.embed_tokens(torch.tensor([list(tokens)]))
        positions = torch.arange(1, len(tokens) + 1).expand(*self.rope_axes, 1, -1)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(embedded, positions)
        return self.layer(embedded, hidden[None], rotary, mask, None, None)[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the target's LM head."""
        return self.model.lm_head(hidden)

    def outputs(self, text: Sequence[int], hidden: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Return each row's output, its root path run as a chain.

        Rows of the committed prefix take the target's hidden states, the drafted ones their parent's own output.

        Args:
            text: Committed tokens, then the root.
            hidden: The target's hidden states of the committed tokens.
            tree: With tokens, root first.
        """
        rows: dict[int, torch.Tensor] = {}
        for row in range(tree.num_rows):
            path = tree.path(row)
            inputs = torch.cat([hidden, *(rows[node][None] for node in path[:-1])])
            rows[row] = self.chain([*text[1:-1], *(tree.tokens[node] for node in path)], inputs)[-1]
        return torch.stack(list(rows.values()))

    def propose(self, text: Sequence[int], hidden: torch.Tensor, shape: DraftTree) -> DraftTree:
        """Return the tree that the head drafts: each row's children are its most likely tokens, best first."""
        tree = shape.with_tokens([text[-1]] + [0] * shape.num_drafts)
        for row in range(shape.num_rows):
            children = shape.children(row)
            if children:
                best = self.logits(self.outputs(text, hidden, tree.prefix(row + 1))[row]).topk(len(children)).indices
                drafted = list(tree.tokens)
                for child, token in zip(children, best.tolist(), strict=True):
                    drafted[child] = token
                tree = tree.with_tokens(drafted)
        return tree
