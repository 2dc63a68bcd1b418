"""Which buffers share memory, as far as shapes and strides tell: nothing is asked of a device."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from treewy.errors import ShapeError
from treewy.shapes import Tensor


class _Span(NamedTuple):
    """Where a tensor lies, in bytes: its first and the one past its last, how far rows lie apart, how long one is."""

    first: int
    end: int
    row_stride: int
    row_len: int
    name: str
    is_written: bool


def check_apart(
    written: Mapping[str, Tensor], read: Mapping[str, Tensor], *, same: Collection[tuple[str, str]] = ()
) -> None:
    """Check that what is written overlaps nothing else: kernels write while others still read.

    Tensors count as overlapping from their first byte to their last, unless their rows, along the first axis, lie
    equally far apart and beside one another, as those of columns of one table do.

    Args:
        written: Buffers that are written, by name.
        read: Operands that are read only, by name.
        same: Pairs of names, in either order, that may be one buffer.

    Raises:
        ShapeError: two overlap.
    """
    spans = sorted(_span(name, x, name in written) for name, x in {**read, **written}.items() if x.numel())
    for place, one in enumerate(spans):
        for other in spans[place + 1 :]:
            if other.first >= one.end:
                break
            names = one.name, other.name
            is_one = (names in same or names[::-1] in same) and one[:4] == other[:4]
            if (one.is_written or other.is_written) and not is_one and _overlap(one, other):
                raise ShapeError(
                    f"What a step writes must not overlap what else it works on; {one.name} lies at bytes {one.first} to "
                    f"{one.end} and {other.name} at {other.first} to {other.end}. Give each a buffer of its own; of records, "
                    "alternate two."
                )


def _span(name: str, x: Tensor, is_written: bool) -> _Span:
    first = x.data_ptr()
    if x.is_contiguous():
        size = x.nbytes
        return _Span(first, first + size, size // x.shape[0], size // x.shape[0], name, is_written)
    size, strides = x.element_size(), x.stride()
    row_len = size * (1 + sum((length - 1) * stride for length, stride in zip(x.shape[1:], strides[1:], strict=True)))
    row_stride = size * strides[0]
    return _Span(first, first + (x.shape[0] - 1) * row_stride + row_len, row_stride, row_len, name, is_written)


def _overlap(one: _Span, other: _Span) -> bool:
    """Return whether two spans that meet share a byte; `one` is the first of them."""
    stride = one.row_stride
    if stride != other.row_stride or stride == 0:
        return True
    offset = (other.first - one.first) % stride
    return offset < one.row_len or offset + other.row_len > stride
