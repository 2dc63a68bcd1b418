"""What the kernels of the gated delta rule take: operands with their strides, grouped as they belong together.

A group that is None is one that a launch does not have. Axes whose stride is not listed are contiguous.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.gdn.records import History, Projections, Record
from treewy.shapes import Tensor

Stride = int


class Sizes(NamedTuple):
    """What is compiled in, all of it `tl.constexpr`: dims, blocks, and how to compute.

    Attributes:
        H: Key heads.
        HV: Value heads.
        K: Key dim.
        V: Value dim.
        BT: Rows of a tree, padded to a power of two from 16 on.
        BK: Part of K that is taken at a time, a power of two that divides it.
        BV: Part of V that one program works on.
        finished: Whether rows are finished operands.
        fold: What becomes of prior rows, as `triton_step` names it.
        exact: Whether products keep float32's accuracy.
        precision: Of products of float32 operands.
        gram_precision: The same of grams: nearly equal keys amplify what they lose.
        scale: Of queries.
        beta_scale: Of betas.
    """

    H: Any
    HV: Any
    K: Any
    V: Any
    BT: Any
    BK: Any
    BV: Any
    finished: Any
    fold: Any
    exact: Any
    precision: Any
    gram_precision: Any
    scale: Any
    beta_scale: Any


class Rows(NamedTuple):
    """The rows of this step: raw projections, or finished operands with a as g, b as beta, and empty a_log and dt_bias.

    Triton compares no tuple that holds a None with None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    q_row: Stride
    q_head: Stride
    k_row: Stride
    k_head: Stride
    v_row: Stride
    v_head: Stride
    a_row: Stride
    a_head: Stride
    b_row: Stride
    b_head: Stride


class State(NamedTuple):
    """The pool, in either layout."""

    p: Tensor
    slot: Stride
    head: Stride
    v: Stride
    k: Stride


class Out(NamedTuple):
    """Outputs of the rows."""

    p: Tensor
    row: Stride


class Kept(NamedTuple):
    """A record: the one that is written, or the one that the path's rows are in."""

    u: Tensor
    k: Tensor
    high: Tensor
    low: Tensor
    u_row: Stride
    k_row: Stride
    high_row: Stride
    low_row: Stride


class Past(NamedTuple):
    """Histories of all slots."""

    u: Tensor
    k: Tensor
    high: Tensor
    low: Tensor
    lengths: Tensor
    u_slot: Stride
    k_slot: Stride
    high_slot: Stride
    low_slot: Stride
    u_row: Stride
    u_head: Stride
    k_row: Stride
    k_head: Stride


def rows_args(x: Projections) -> Rows:
    """Return raw rows as the kernel takes them."""
    names = ("q", "k", "v", "a", "b")
    return Rows(*x[:7], *(stride for name in names for stride in getattr(x, name).stride()[:2]))


def finished_args(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Rows:
    """Return finished operands as the kernel takes them."""
    none = g[:0, 0]
    return Rows(q, k, v, g, beta, none, none, *(stride for part in (q, k, v, g, beta) for stride in part.stride()[:2]))


def state_args(state: Tensor) -> State:
    """Return a pool as the kernel takes it."""
    return State(state, *state.stride())


def record_args(record: Record) -> Kept:
    """Return a record as the kernel takes it."""
    return Kept(*record, *(part.stride(0) for part in record))


def history_args(history: History) -> Past:
    """Return a history as the kernel takes it."""
    slots = (part.stride(0) for part in history[:4])
    return Past(*history, *slots, *history.u.stride()[1:3], *history.k.stride()[1:3])


def check_layout(named: Mapping[str, Tensor | None], leading: int) -> None:
    """Check that all axes behind the first `leading` are contiguous.

    Raises:
        ShapeError: one is not.
    """
    for name, part in named.items():
        if part is None or not part.numel():
            continue
        inner = part[(0,) * leading] if leading else part
        if not inner.is_contiguous():
            raise ShapeError(
                f"Kernels must find all axes of {name} behind the first {leading} contiguous; got shape "
                f"{tuple(part.shape)} with strides {part.stride()}. Pass {name}.contiguous()."
            )


def check_dtypes(named: Mapping[str, Tensor | None]) -> None:
    """Check that kernels have the dtypes.

    Raises:
        UnsupportedError: one is not a float of 16 or 32 bits.
    """
    for name, part in named.items():
        if part is not None and part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"Kernels must be given floats of 16 or 32 bits; got {name} as {part.dtype}. Use backend='eager'."
            )
