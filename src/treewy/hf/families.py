"""What must be known of each supported model type; everything else is transformers' own code."""

from collections.abc import Callable
from typing import Any, NamedTuple

from treewy.errors import UnsupportedError
from treewy.hf.mixers import grouped_projections, separate_projections, split_projections


class Family(NamedTuple):
    """One model type.

    Attributes:
        mixer: Forward of its gated-delta layers over packed rows.
        rope_axes: Leading axes of the positions that its rotary tables take: (3,) for time, height and width, which text
            has equal; () for plain positions. Does not matter without a head.
        has_head: Whether its checkpoints may hold a multi-token-prediction head, under `mtp.*`.
    """

    mixer: Callable[..., Any]
    rope_axes: tuple[int, ...]
    has_head: bool


FAMILIES = {
    "qwen3_5_text": Family(split_projections, rope_axes=(3,), has_head=True),
    "qwen3_5_moe_text": Family(split_projections, rope_axes=(3,), has_head=True),
    "qwen3_next": Family(grouped_projections, rope_axes=(), has_head=True),
    "olmo_hybrid": Family(separate_projections, rope_axes=(), has_head=False),
}
SUPPORTED = tuple(FAMILIES)

_KINDS = ("linear_attention", "full_attention")
# Rotary tables of these change with the longest position of a forward: rows would depend on their neighbours, and the
# model's own buffers would not stay as they were.
_MOVING_ROPE = ("dynamic", "longrope")


def family_of(config: Any) -> Family:
    """Return the family of a text config.

    Raises:
        UnsupportedError: the model type is not supported, or the config asks for something that no layer here does.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"The model's text type must be one of {', '.join(SUPPORTED)}; got {config.model_type!r}. "
            "Use a checkpoint of one of them."
        )
    _check_attention(config)
    return FAMILIES[config.model_type]


def check_head(config: Any) -> None:
    """Refuse a text config whose family has no multi-token-prediction head.

    Raises:
        UnsupportedError: it has none.
    """
    if not family_of(config).has_head:
        heads = [name for name, family in FAMILIES.items() if family.has_head]
        raise UnsupportedError(
            f"Drafting with mtp needs a text type with a multi-token-prediction head, {', '.join(heads)}; "
            f"{config.model_type!r} has none. Use another drafter, or draft 'none'."
        )


def _check_attention(config: Any) -> None:
    other = sorted(set(config.layer_types).difference(_KINDS))
    if other:
        raise UnsupportedError(
            f"Layers must be one of {', '.join(_KINDS)}; the config's layer_types hold {other[0]!r}. "
            "Use a checkpoint without such layers."
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedError(
            f"Attention must reach over the whole text; the config sets sliding_window={window}. "
            "Use a checkpoint without a sliding window."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in _MOVING_ROPE:
        raise UnsupportedError(
            f"Rotary tables must not depend on the length of the text; the config's rope_type is {rope!r}. "
            "Use a fixed type, such as 'default' or 'yarn'."
        )
