"""Entry points of the tree convolution, with their checks."""

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.dispatch import Implementations, select
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Float, Int, Tensor

ACTIVATIONS = (None, "silu", "swish")


def verify(
    x: Float[Tensor, "N C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    window: Float[Tensor, "S W1 C"],
    slots: Int[Tensor, "B"],
    tree: PackedTree,
    *,
    activation: str | None = "silu",
    backend: str | None = None,
) -> Float[Tensor, "N C"]:
    """Convolve each row with its W - 1 nearest ancestors; above the root, with the committed window.

    Args:
        x: Inputs of the convolution, before any activation.
        weight: Taps, oldest first.
        bias: Added before the activation.
        window: Pool of the last W - 1 committed inputs, oldest first. Read only.
        slots: Pool slot of each sequence; -1 makes its rows inert.
        tree: The packed trees.
        activation: None or "silu".
        backend: "eager" (default) or "reference".

    Raises:
        ShapeError: operands do not fit the tree or the window.

    Source: eq. 10 of docs/theory.md.
    """
    _check(x, weight, bias, window, slots, tree)
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"The activation must be one of {ACTIVATIONS}; got {activation!r}. Apply it outside.")
    return _implementation("conv.verify", backend).verify(x, weight, bias, window, slots, tree, activation)


def commit(
    window: Float[Tensor, "S W1 C"],
    slots: Int[Tensor, "B"],
    x: Float[Tensor, "N C"],
    path: PackedPath,
    *,
    backend: str | None = None,
) -> None:
    """Move each window forward over its accepted path; short paths keep the newest old inputs."""
    _check_slots_shape(slots, path.tree)
    if x.shape != (path.tree.num_rows, window.shape[2]):
        raise ShapeError(
            f"x must be [{path.tree.num_rows}, {window.shape[2]}], the inputs that were verified; got {tuple(x.shape)}."
            " Keep the step's conv inputs until commit."
        )
    _implementation("conv.commit", backend).commit(window, slots, x, path)


def _implementation(op: str, backend: str | None):
    from treewy.ops.conv import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.conv.kernels"), backend)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, slots: Tensor, tree: PackedTree) -> None:
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
    _check_slots_shape(slots, tree)


def _check_slots_shape(slots: Tensor, tree: PackedTree) -> None:
    if tuple(slots.shape) != (tree.num_seqs,):
        raise ShapeError(f"slots must have {tree.num_seqs} entries; got shape {tuple(slots.shape)}. One per sequence.")
