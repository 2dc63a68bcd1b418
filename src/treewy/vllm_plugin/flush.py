"""Bringing a request's page up to date, for whoever reads it without knowing of kept rows."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from treewy.ops import gdn
from treewy.ops import tree as trees
from treewy.shapes import Float, Int, Tensor


def flush_state(
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    kept: gdn.History,
    places: Int[Tensor, "B"],
    layer: Any,
    backend: str,
) -> None:
    """Fold kept rows into the states of one layer; lengths stay, for the other layers.

    Args:
        state: Its pages' states.
        slots: State of each sequence.
        kept: Its kept rows.
        places: Request of each sequence.
        layer: The layer, for its gates' parameters.
        backend: Backend of the rule.
    """
    device = state.device

    def rows(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, heads, dim, dtype=dtype, device=device)

    heads, (value_heads, value_dim, key_dim) = kept.k.shape[2], state.shape[1:]
    k, v = rows(heads, key_dim, kept.k.dtype), rows(value_heads, value_dim, kept.k.dtype)
    gates = torch.empty(0, value_heads, dtype=kept.k.dtype, device=device)
    decay = torch.empty(0, value_heads, dtype=torch.float32, device=device)
    x = gdn.Projections(k, k, v, gates, gates, layer.A_log, layer.dt_bias)
    out = gdn.Verified(v, gdn.Record(rows(value_heads, value_dim, kept.u.dtype), k, decay, decay.clone()))
    prior = gdn.Prior(kept, None, None, torch.ones_like(places), places=places)
    gdn.commit_verify(x, state, slots, trees.empty(len(slots), 0, 1, device), prior=prior, out=out, backend=backend)


def flush_window(
    window: Float[Tensor, "S C X"], slots: Int[Tensor, "B"], num_accepted: Int[Tensor, "B"], width: int
) -> None:
    """Move the newest accepted inputs of rolling windows to their front, where a request that drafted nothing has them.

    Args:
        window: Windows of all slots; see `conv.chain_conv`.
        slots: Window of each sequence.
        num_accepted: Rows that each accepted in its last step.
        width: Taps of the convolution (W).
    """
    columns = num_accepted.long()[:, None] - 1 + torch.arange(width - 1, device=window.device)
    own = window[slots.long()]
    newest = own.gather(2, columns[:, None, :].expand(-1, own.shape[1], -1))
    own[:, :, : width - 1] = newest
    window[slots.long()] = own


def clear(vllm: ModuleType, layers: Sequence[Any], slots: Sequence[Int[Tensor, "B"]]) -> None:
    """Make the pages of some requests those of an empty prompt, in every layer: a page comes with what another left in it.

    Args:
        vllm: The compat module of the installed vLLM.
        layers: The plugin's layers.
        slots: For each layer the pages of these requests.
    """
    for layer, pages in zip(layers, slots, strict=True):
        vllm.state_of(layer)[pages.long()] = 0
        vllm.window_of(layer)[pages.long()] = 0


def flush(
    vllm: ModuleType,
    layers: Sequence[Any],
    slots: Int[Tensor, "L B"],
    requests: Int[Tensor, "B"],
    num_accepted: Int[Tensor, "B"],
) -> None:
    """Bring the pages of some requests up to date in every layer; what the requests keep is then to be forgotten.

    Args:
        vllm: The compat module of the installed vLLM.
        layers: The plugin's layers.
        slots: For each layer the pages of these requests.
        requests: Where their kept rows lie.
        num_accepted: Rows that each accepted in its last step.
    """
    for layer, pages in zip(layers, slots, strict=True):
        shared = layer.treewy
        kept = shared.memory.kept_of(layer.treewy_number)
        flush_state(vllm.state_of(layer), pages, kept, requests, layer, shared.backend)
        flush_window(vllm.window_of(layer), pages, num_accepted, layer.conv_kernel_size)
