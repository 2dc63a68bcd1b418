"""vLLM's rolling windows as draft trees use them: taking what was accepted, writing a step's rows, compacting, in PyTorch.

With W taps, a window's columns hold the W - 2 inputs before the last step and behind them that step's rows, of a tree in
the order of its rows. Once its accepted rows have been moved together, it is the window of a chain of the accepted path, and
vLLM may copy it as one.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from treewy.errors import BackendError, ShapeError
from treewy.ops.paths import check_path_shape
from treewy.packed import PathTables, TreeTables
from treewy.shapes import Float, Int, Tensor


class WindowTable:
    """The windows of all layers, for one launch that moves columns in all of them.

    Args:
        windows: Of each layer, channels first, as views of its pages. They stay where they are as long as the table is used.

    Attributes:
        windows: The same.
        addresses: Of the first element of each layer's.
        aligned: Whether all of them begin at a multiple of 16 bytes.

    Raises:
        ShapeError: the layers' windows differ in shape, strides, dtype or device, or there is none.
    """

    def __init__(self, windows: Sequence[Float[Tensor, "S C X"]]) -> None:
        kinds = {(tuple(one.shape), one.stride(), one.dtype, one.device) for one in windows}
        if len(kinds) != 1:
            raise ShapeError(
                f"The windows of all layers must have one shape, strides, dtype and device; got {len(kinds)} kinds: "
                f"{sorted(map(str, kinds))}. Make a table for each kind."
            )
        self.windows = tuple(windows)
        addresses = [one.data_ptr() for one in windows]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=windows[0].device)
        self.aligned = all(address % 16 == 0 for address in addresses)


def compact_windows(
    table: WindowTable, slots: Int[Tensor, "L B"], path: PathTables, width: int, *, backend: str | None = None
) -> None:
    """Move the rows that each sequence accepted together, behind the W - 2 inputs before the step, in every layer.

    Nothing else is written. A row that the window has no column for, and a sequence whose slot is -1 or outside the pool,
    move nothing.

    Args:
        table: The windows.
        slots: Window of each sequence, for each layer. Of any strides: `expand` where layers share theirs.
        path: Accepted rows, local to each tree, the root first, ascending; their number.
        width: Taps of the convolution (W).
        backend: "eager" or "triton"; default: the kernel on a GPU, else PyTorch. The kernel is safe in a CUDA graph.

    Raises:
        ShapeError: slots or path do not fit the layers or each other.
        UnsupportedError: a dtype that the kernel does not have.
        BackendError: there is no such backend.
    """
    if slots.ndim != 2 or slots.shape[0] != len(table.windows):
        raise ShapeError(
            f"slots must be [{len(table.windows)}, B], of each layer; got {tuple(slots.shape)}. Stack or expand them."
        )
    check_path_shape(path, slots.shape[1])
    kernels = _kernels(table.addresses, backend)
    if kernels is not None:
        kernels.move_columns(table, slots, path, width - 2)
        return
    for window, own in zip(table.windows, slots, strict=True):
        _move_columns(window, own, path, width - 2)


def roll_windows(
    window: Float[Tensor, "S C X"],
    slots: Int[Tensor, "B"],
    num_accepted: Int[Tensor, "R"],
    x: Float[Tensor, "N C"],
    tree: TreeTables,
    width: int,
    *,
    backend: str | None = None,
) -> tuple[Float[Tensor, "B W1 C"], Int[Tensor, "B"]]:
    """Return the W - 1 newest accepted inputs of each sequence, and write its rows into its window.

    Sequences without rows, and those whose slot is -1 or outside the pool, are inert: their windows stay as they are.

    Args:
        window: Windows of all slots, of any strides.
        slots: Window of each sequence.
        num_accepted: Rows that each sequence accepted in its last step, at least 1; more entries than sequences are ignored.
        x: Rows as projected.
        tree: The trees.
        width: Taps of the convolution (W).
        backend: As in `compact_windows`.

    Returns:
        The inputs as a pool of their own, oldest first, and the place of each sequence in it; inert ones have -1.

    Raises:
        ShapeError: the window has fewer columns than the trees may have rows, or operands do not fit each other.
        UnsupportedError: a dtype that the kernel does not have.
        BackendError: there is no such backend.
    """
    _check_roll(window, slots, num_accepted, x, tree, width)
    kernels = _kernels(x, backend)
    roll = _roll if kernels is None else kernels.roll
    return roll(window, slots, num_accepted[: tree.num_seqs], x, tree, width)


def _roll(
    window: Tensor, slots: Tensor, num_accepted: Tensor, x: Tensor, tree: TreeTables, width: int
) -> tuple[Tensor, Tensor]:
    num_slots, channels, columns = window.shape
    live = (slots >= 0) & (slots < num_slots) & (tree.cu_rows.diff() > 0)
    seqs = live.nonzero()[:, 0]
    at = slots.long()[seqs, None]
    first = num_accepted.long()[seqs, None].clamp(1, columns - width + 2) - 1
    newest = torch.zeros(len(slots), width - 1, channels, dtype=window.dtype, device=window.device)
    newest[seqs] = window[at, :, first + torch.arange(width - 1, device=first.device)]
    window[at, :, torch.arange(width - 2, device=first.device)] = newest[seqs, 1:]

    rows = (tree.seq_of_row >= 0).nonzero()[:, 0]
    rows = rows[live[tree.seq_of_row.long()[rows]]]
    owner = tree.seq_of_row.long()[rows]
    window[slots.long()[owner], :, width - 2 + rows - tree.cu_rows.long()[owner]] = x[rows].to(window.dtype)
    return newest, torch.where(live, torch.arange(len(slots), device=slots.device), -1)


def _move_columns(window: Tensor, slots: Tensor, path: PathTables, older: int) -> None:
    live = ((slots >= 0) & (slots < window.shape[0]))[:, None]
    target = torch.arange(path.rows.shape[1], device=path.rows.device)
    moved = live & (target < path.lengths[:, None]) & (path.rows > target) & (path.rows < window.shape[2] - older)
    seq, place = moved.nonzero(as_tuple=True)
    at = slots.long()[seq]
    window[at, :, older + place] = window[at, :, older + path.rows[seq, place].long()]


def _check_roll(window: Tensor, slots: Tensor, num_accepted: Tensor, x: Tensor, tree: TreeTables, width: int) -> None:
    if x.shape != (tree.num_rows, window.shape[1]):
        raise ShapeError(
            f"x must be [{tree.num_rows}, {window.shape[1]}] for this tree and window; got {tuple(x.shape)}. "
            "Pack the rows of all sequences on one axis."
        )
    if window.shape[2] < width - 2 + tree.max_rows:
        raise ShapeError(
            f"A window must have {width - 2 + tree.max_rows} columns for {width} taps and trees of up to {tree.max_rows} "
            f"rows; got {window.shape[2]}. Give vLLM as many speculative tokens as a tree has drafts."
        )
    if tuple(slots.shape) != (tree.num_seqs,) or len(num_accepted) < tree.num_seqs:
        raise ShapeError(
            f"slots must have {tree.num_seqs} entries and num_accepted at least as many; got {tuple(slots.shape)} and "
            f"{tuple(num_accepted.shape)}. One per sequence."
        )


def _kernels(operand: Tensor, backend: str | None) -> ModuleType | None:
    """Return the kernels' module, imported only where they run, or None for PyTorch."""
    if backend not in (None, "eager", "triton"):
        raise BackendError(f"A backend of windows must be eager or triton; got {backend!r}. Leave it out.")
    if backend == "eager" or (backend is None and not operand.is_cuda):
        return None
    from treewy.vllm_plugin import window_kernels

    return window_kernels
