"""Entry points of the tree convolution, with their checks."""

from typing import NamedTuple

import torch

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.dispatch import Implementations, select
from treewy.ops.memory import check_apart
from treewy.ops.paths import check_path_shape
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.shapes import Float, Int, Tensor

ACTIVATIONS = (None, "silu", "swish")


class Split(NamedTuple):
    """The channels of a convolution's output by what they become, as views of one [N, C] tensor."""

    q: Float[Tensor, "N _"]
    k: Float[Tensor, "N _"]
    v: Float[Tensor, "N _"]


def verify(
    x: Float[Tensor, "N C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    window: Float[Tensor, "S W1 C"],
    slots: Int[Tensor, "B"],
    tree: PackedTree | TreeTables,
    *,
    activation: str | None = "silu",
    out: Float[Tensor, "N C"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "N C"]:
    """Convolve each row with its W - 1 nearest ancestors; above the root, with the committed window.

    Args:
        x: Inputs of the convolution, before any activation.
        weight: Taps, oldest first.
        bias: Added before the activation.
        window: Pool of the last W - 1 committed inputs, oldest first. Read only.
        slots: Pool slot of each sequence; -1 makes its rows inert.
        tree: The packed trees. With tables the kernels are safe in a CUDA graph.
        activation: None or "silu".
        out: Buffer to write into, apart from x and all else; default: a fresh one with the dtype of x.
        backend: "eager" (default), "reference" or "triton". Kernels read operands of any strides; weights whose taps lie
            far apart, `weight.T.contiguous().T`, are quickest. Slots are checked on the host, but not by kernels that are
            given tables: to them a slot outside the pool is inert.

    Raises:
        ShapeError: operands do not fit the tree or the window, or `out` overlaps one.
        CapacityError: a slot is out of range or taken twice.
        UnsupportedError: an activation, or a dtype or width of the kernels, that there is not.

    Source: eq. 10 of docs/theory.md.
    """
    _check(x, weight, bias, window, slots, tree)
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"The activation must be one of {ACTIVATIONS}; got {activation!r}. Apply it outside.")
    if out is None:
        out = torch.empty_like(x)
    elif out.shape != x.shape:
        raise ShapeError(f"out must be {tuple(x.shape)}, as x is; got {tuple(out.shape)}. Make it for this many rows.")
    else:
        others = {"x": x, "weight": weight, "window": window} | ({} if bias is None else {"bias": bias})
        check_apart({"out": out}, others)
    _implementation("conv.verify", backend).verify(x, weight, bias, window, slots, tree, activation, out)
    return out


def verify_split(
    x: Float[Tensor, "N C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    window: Float[Tensor, "S W1 C"],
    slots: Int[Tensor, "B"],
    tree: PackedTree | TreeTables,
    sizes: tuple[int, int, int],
    *,
    activation: str | None = "silu",
    out: Float[Tensor, "N C"] | None = None,
    backend: str | None = None,
) -> Split:
    """Convolve as `verify` does and return the channels of q, k and v: H K, H K and HV V of them.

    The parts are views of `out`: the rows of each lie C apart, its channels side by side. Nothing is moved.
    """
    if sum(sizes) != x.shape[1]:
        raise ShapeError(
            f"The sizes of q, k and v must make up all {x.shape[1]} channels; got {sizes}, {sum(sizes)} together. Pass "
            "(H * K, H * K, HV * V)."
        )
    y = verify(x, weight, bias, window, slots, tree, activation=activation, out=out, backend=backend)
    return Split(*y.split(sizes, dim=1))


def commit(
    window: Float[Tensor, "*layers S W1 C"],
    slots: Int[Tensor, "B"],
    x: Float[Tensor, "*layers N C"],
    path: PackedPath | PathTables,
    *,
    backend: str | None = None,
) -> None:
    """Move each window forward over its accepted path; short paths keep the newest old inputs.

    Empty paths and slot -1 change nothing, bit for bit.

    Args:
        window: Pool of windows. A first axis of layers moves those of all layers, in one launch of the kernel.
        slots: Pool slot of each sequence, no slot twice; -1 makes it inert. Checked as in `verify`.
        x: The inputs that were verified, of each layer.
        path: The accepted rows. With tables the kernel is safe in a CUDA graph, and leaves a place as it was for a row that
            x lacks.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit the window or the path; a path has a row that x lacks (eager, reference).
        CapacityError: a slot is out of range or taken twice.
        UnsupportedError: a dtype or width that the kernel does not have.
    """
    _check_commit(window, slots, x, path)
    _implementation("conv.commit", backend).commit(window, slots, x, path)


def _implementation(op: str, backend: str | None):
    from treewy.ops.conv import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.conv.kernels"), backend)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, slots: Tensor, tree: PackedTree | TreeTables
) -> None:
    channels, width = weight.shape
    if x.shape != (tree.num_rows, channels):
        raise ShapeError(
            f"x must be [{tree.num_rows}, {channels}] for this tree and weight; got {tuple(x.shape)}. "
            "Pack the rows of all sequences on one axis."
        )
    if bias is not None and bias.shape != (channels,):
        raise ShapeError(f"bias must be [{channels}], one per channel; got {tuple(bias.shape)}. Expand it first.")
    if window.shape[1:] != (width - 1, channels):
        raise ShapeError(
            f"window must be [slots, {width - 1}, {channels}] for a width-{width} convolution; "
            f"got {tuple(window.shape)}. Windows hold inputs, one row per token."
        )
    _check_slots_shape(slots, tree.num_seqs)


def _check_commit(window: Tensor, slots: Tensor, x: Tensor, path: PackedPath | PathTables) -> None:
    *layers, _, _, channels = window.shape
    rows = path.tree.num_rows if isinstance(path, PackedPath) else x.shape[-2]
    if len(layers) > 1 or x.shape != (*layers, rows, channels):
        raise ShapeError(
            f"x must be {[*layers[:1], rows, channels]}, the inputs that were verified, for a window "
            f"{tuple(window.shape)}; got {tuple(x.shape)}. Keep the step's conv inputs until commit."
        )
    _check_slots_shape(slots, len(path.lengths))
    if isinstance(path, PathTables):
        check_path_shape(path, len(path.lengths))


def _check_slots_shape(slots: Tensor, num_seqs: int) -> None:
    if tuple(slots.shape) != (num_seqs,):
        raise ShapeError(f"slots must have {num_seqs} entries; got shape {tuple(slots.shape)}. One per sequence.")
