"""Which tokens become a row's children: the drafter's most likely ones, or drawn ones."""

import torch

from treewy.draft.base import Draws
from treewy.sampling import Law, draw_without_replacement, log_probabilities
from treewy.shapes import Float, Int, Tensor


def most_likely(logits: Float[Tensor, "R vocab"], num_children: int) -> Int[Tensor, "R X"]:
    """Return each row's most likely tokens, best first."""
    return logits.topk(num_children, dim=-1).indices


def drawn(
    logits: Float[Tensor, "R vocab"], num_children: int, draws: Draws
) -> tuple[Int[Tensor, "R X"], Float[Tensor, "R vocab"]]:
    """Draw each row's children, one after the other without replacement; return them with the law of the first.

    A law that is not a number becomes one without support: its children are chosen.
    """
    law = draws.law.probabilities(logits).nan_to_num(0.0)
    uniforms = torch.from_numpy(draws.stream.uniform(len(logits), num_children)).to(logits.device)
    return draw_without_replacement(law, uniforms), law


def log_chances(logits: Float[Tensor, "R vocab"], tokens: Int[Tensor, "R X"], law: Law | None) -> Float[Tensor, "R X"]:
    """Return the log-probability of each row's tokens: under `law`, or as the drafter's own logits have it.

    NaN where the logits are not numbers.
    """
    all_tokens = log_probabilities(logits) if law is None else law.probabilities(logits).log()
    return all_tokens.gather(-1, tokens)
