"""Forwards of gated-delta mixers over packed rows, with the step as their memory: one per layout of projections."""

from typing import Any, NamedTuple

import torch

from treewy.cache import Step
from treewy.ops import gdn
from treewy.shapes import Float, Tensor


class Projected(NamedTuple):
    """What a mixer projects its rows to.

    Attributes:
        qkv: Inputs of the convolution: all queries, then all keys, then all values, heads in order.
        z: Inputs of the output gates, value heads in order.
        b: Inputs of beta.
        a: Inputs of the decays.
    """

    qkv: Float[Tensor, "N C"]
    z: Float[Tensor, "N HV*V"]
    b: Float[Tensor, "N HV"]
    a: Float[Tensor, "N HV"]


def split_projections(
    mixer: Any, hidden_states: Float[Tensor, "1 N hidden"], *, treewy_step: Step, **unused: Any
) -> Float[Tensor, "1 N hidden"]:
    """Run a Qwen3.5 mixer, dense or sparse: `in_proj_{qkv,z,b,a}`, each in the order of its heads."""
    del unused
    x = hidden_states[0]
    projected = Projected(mixer.in_proj_qkv(x), mixer.in_proj_z(x), mixer.in_proj_b(x), mixer.in_proj_a(x))
    return _mix(mixer, projected, treewy_step, norm=mixer.norm, out_proj=mixer.out_proj)


def grouped_projections(
    mixer: Any, hidden_states: Float[Tensor, "1 N hidden"], *, treewy_step: Step, **unused: Any
) -> Float[Tensor, "1 N hidden"]:
    """Run a Qwen3-Next mixer: `in_proj_qkvz` and `in_proj_ba`, grouped by key head.

    A key head's rows of `in_proj_qkvz` are its query, its key, and the values and gates of its value heads; those of
    `in_proj_ba` are its value heads' betas, then their decays.
    """
    del unused
    x = hidden_states[0]
    heads, values = mixer.num_k_heads, mixer.value_dim // mixer.num_k_heads
    qkvz = mixer.in_proj_qkvz(x).unflatten(-1, (heads, -1))
    q, k, v, z = qkvz.split([mixer.head_k_dim, mixer.head_k_dim, values, values], dim=-1)
    b, a = mixer.in_proj_ba(x).unflatten(-1, (heads, -1)).chunk(2, dim=-1)
    qkv = torch.cat([part.flatten(-2) for part in (q, k, v)], dim=-1)
    projected = Projected(qkv, z.flatten(-2), b.flatten(-2), a.flatten(-2))
    return _mix(mixer, projected, treewy_step, norm=mixer.norm, out_proj=mixer.out_proj)


def separate_projections(
    mixer: Any, hidden_states: Float[Tensor, "1 N hidden"], *, treewy_step: Step, **unused: Any
) -> Float[Tensor, "1 N hidden"]:
    """Run an OLMo-Hybrid mixer: `{q,k,v,g,b,a}_proj`, and beta up to 2 if the config allows negative eigenvalues."""
    del unused
    x = hidden_states[0]
    qkv = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], dim=-1)
    projected = Projected(qkv, mixer.g_proj(x), mixer.b_proj(x), mixer.a_proj(x))
    beta_scale = 2.0 if mixer.allow_neg_eigval else 1.0
    return _mix(mixer, projected, treewy_step, norm=mixer.o_norm, out_proj=mixer.o_proj, beta_scale=beta_scale)


def _mix(
    mixer: Any, projected: Projected, step: Step, *, norm: Any, out_proj: Any, beta_scale: float = 1.0
) -> Float[Tensor, "1 N hidden"]:
    """Run projected rows down every root path: convolution, gates, delta rule, gated norm, output projection.

    Gates, convolution and norm are those of transformers' own forwards; beta's sigmoid is taken in float32.
    """
    layer, keys = mixer.layer_idx, mixer.key_dim
    mixed = step.conv(layer, projected.qkv, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.activation)
    q, k, v = mixed.split([keys, keys, mixer.value_dim], dim=-1)
    q, k = (y.unflatten(-1, (-1, mixer.head_k_dim)) for y in (q, k))
    v = v.unflatten(-1, (-1, mixer.head_v_dim))
    g, beta = gdn.finish_gates(projected.a, projected.b, mixer.A_log, mixer.dt_bias, beta_scale=beta_scale)
    o = step.delta(layer, gdn.scale_queries(q), gdn.l2_normalise(k), v, g, beta, out_dtype=mixed.dtype)
    normed = norm(o.reshape(-1, mixer.head_v_dim), projected.z.reshape(-1, mixer.head_v_dim))
    return out_proj(normed.reshape(o.shape[0], -1)).unsqueeze(0)
