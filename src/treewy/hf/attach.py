"""Standing in for a model's mixers during one forward, and leaving it as it was.

Only what has memory is replaced: the forward of each gated-delta mixer (its weights stay where they are) and the
attention function, through transformers' own registry. The step travels as a keyword argument of the model's forward,
so nothing is global and nothing outlives the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from torch import nn
from transformers.modeling_utils import AttentionInterface

from treewy.draft.mtp import Attends
from treewy.errors import RequestError, UnsupportedError
from treewy.hf.families import FAMILIES
from treewy.shapes import Tensor

ATTENTION_NAME = "treewy"
STEP_ARGUMENT = "treewy_step"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    treewy_step: Attends | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend by tree: transformers' attention function over the packed row, heads second ([1, heads, N, E])."""
    del attention_mask, unused
    if treewy_step is None:
        raise RequestError(
            "This attention function runs inside a treewy step only; it was called by a plain forward. "
            "Set the model's attention implementation back to 'sdpa'."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    o = treewy_step.attend(module.layer_idx, q, k, v, scale=scaling)
    return o.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attention)

# While a forward runs, its model is not as others know it: treewy's own forwards take turns. A plain forward of the same
# model in another thread is the caller's to keep apart.
_TURN = Lock()


@contextmanager
def attached(layers: nn.ModuleList, config: Any) -> Iterator[None]:
    """Replace the mixers of `layers` for one forward; put everything back, also after an exception.

    Args:
        layers: Decoder layers.
        config: The config object their attention modules read; its type says which forward stands in.
    """
    forward = FAMILIES[config.model_type].mixer
    mixers: list[Any] = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    with _TURN:
        _refuse_wrapped(mixers)
        implementation = config._attn_implementation_internal
        try:
            config._attn_implementation_internal = ATTENTION_NAME
            for mixer in mixers:
                mixer.forward = partial(forward, mixer)
            yield
        finally:
            config._attn_implementation_internal = implementation
            for mixer in mixers:
                mixer.__dict__.pop("forward", None)


def _refuse_wrapped(mixers: list[Any]) -> None:
    """A wrapper on a mixer's forward (offloading does this) would be passed over, and with it what it is for."""
    wrapped = [mixer for mixer in mixers if "forward" in mixer.__dict__]
    if wrapped:
        raise UnsupportedError(
            f"A mixer's forward must be its class's own; layer {wrapped[0].layer_idx} has one of its own "
            f"({wrapped[0].__dict__['forward']!r:.80}). Load the model without offloading or wrappers."
        )
