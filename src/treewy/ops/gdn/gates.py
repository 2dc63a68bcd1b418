"""From raw projections to finished operands: one rounding rule for prefill, decode, verify and commit."""

import torch
from torch.nn import functional

from treewy.shapes import Float, Tensor

L2_EPS = 1e-6


def l2_normalise(x: Float[Tensor, "N H K"]) -> Float[Tensor, "N H K"]:
    """Return `x * rsqrt(sum x^2 + 1e-6)` over the last axis, in at least float32.

    The epsilon is added to the sum, not to the mean. Source: eq. 1 of docs/theory.md.
    """
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def scale_queries(q: Float[Tensor, "N H K"]) -> Float[Tensor, "N H K"]:
    """Return unit queries times K ** -0.5, as the gated delta rule reads its state."""
    return l2_normalise(q) * q.shape[-1] ** -0.5


def finish_gates(
    a: Float[Tensor, "N HV"],
    b: Float[Tensor, "N HV"],
    a_log: Float[Tensor, "HV"],
    dt_bias: Float[Tensor, "HV"],
    *,
    beta_scale: float = 1.0,
) -> tuple[Float[Tensor, "N HV"], Float[Tensor, "N HV"]]:
    """Return (g, beta) from gate projections, both in at least float32.

    g = -exp(A_log) softplus(a + dt_bias) is the log decay; beta = beta_scale sigmoid(b), with beta_scale 2 for models
    whose beta reaches 2. The sigmoid is taken in float32 whatever the model's dtype.

    Source: eq. 2 of docs/theory.md.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    g = -a_log.to(wide).exp() * functional.softplus(a.to(wide) + dt_bias.to(wide))
    return g, beta_scale * torch.sigmoid(b.to(wide))
