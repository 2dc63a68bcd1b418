"""Forwards of gated-delta mixers over packed rows, with the step as their memory."""

from typing import Any

from treewy.cache import Step
from treewy.ops import gdn
from treewy.shapes import Float, Tensor


def gated_delta_net(
    mixer: Any,
    hidden_states: Float[Tensor, "1 N hidden"],
    *,
    treewy_step: Step,
    **unused: Any,
) -> Float[Tensor, "1 N hidden"]:
    """Run a Qwen3.5 mixer (split projections `in_proj_{qkv,z,b,a}`) down every root path.

    Same projections, gates, convolution and gated norm as transformers' own forward; beta's sigmoid is taken in
    float32.
    """
    del unused
    x = hidden_states[0]
    layer, keys = mixer.layer_idx, mixer.key_dim
    mixed = treewy_step.conv(
        layer, mixer.in_proj_qkv(x), mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.activation
    )
    q, k, v = mixed.split([keys, keys, mixer.value_dim], dim=-1)
    q, k = (y.unflatten(-1, (-1, mixer.head_k_dim)) for y in (q, k))
    v = v.unflatten(-1, (-1, mixer.head_v_dim))
    g, beta = gdn.finish_gates(mixer.in_proj_a(x), mixer.in_proj_b(x), mixer.A_log, mixer.dt_bias)
    o = treewy_step.delta(layer, gdn.scale_queries(q), gdn.l2_normalise(k), v, g, beta, out_dtype=x.dtype)
    z = mixer.in_proj_z(x).reshape(-1, mixer.head_v_dim)
    normed = mixer.norm(o.reshape(-1, mixer.head_v_dim), z)
    return mixer.out_proj(normed.reshape(x.shape[0], -1)).unsqueeze(0)
