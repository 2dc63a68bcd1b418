"""The causal convolution over vLLM's rolling windows: of chains in PyTorch, where vLLM's kernel is not, and of draft trees."""

import torch
from torch.nn import functional

from treewy.ops import conv
from treewy.packed import TreeTables
from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.windows import roll_windows


def chain_conv(
    x: Float[Tensor, "N C"],
    window: Float[Tensor, "S C X"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    slots: Int[Tensor, "B"],
    num_accepted: Int[Tensor, "B"],
    cu_rows: Int[Tensor, "B1"],
) -> Float[Tensor, "N C"]:
    """Convolve each sequence's rows behind the inputs it has accepted, with SiLU, and roll its window in place.

    A window holds the last step's inputs behind W - 1 older ones, as many columns as that needs for the longest chain.
    The newest accepted input lies `num_accepted` - 1 columns behind the older ones, so that nothing is moved on rejection.

    Args:
        x: Rows as projected.
        window: Windows of all slots.
        weight: Taps, the newest last.
        bias: Of each channel.
        slots: Window of each sequence.
        num_accepted: Rows that each sequence accepted in its last step.
        cu_rows: Row boundaries of the sequences.
    """
    out, older = torch.empty_like(x), weight.shape[1] - 1
    starts = cu_rows.tolist()
    for seq, (slot, accepted) in enumerate(zip(slots.tolist(), num_accepted.tolist(), strict=True)):
        rows = x[starts[seq] : starts[seq + 1]].T.to(window.dtype)
        columns = window[slot, :, accepted - 1 :]
        inputs = torch.cat([columns[:, :older], rows], dim=1)
        y = functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
        out[starts[seq] : starts[seq + 1]] = functional.silu(y).T
        moved = torch.cat([columns[:, 1:older], rows], dim=1)
        window[slot, :, : moved.shape[1]] = moved
    return out


def tree_conv(
    x: Float[Tensor, "N C"],
    window: Float[Tensor, "S C X"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    slots: Int[Tensor, "B"],
    num_accepted: Int[Tensor, "R"],
    tree: TreeTables,
    *,
    backend: str | None = None,
) -> Float[Tensor, "N C"]:
    """Convolve each row with its W - 1 nearest ancestors, with SiLU, and roll the windows in place; see `chain_conv`.

    Above the root come the newest accepted inputs. Rows of sequences whose slot is -1 or outside the pool are zero, and so
    are those past the last sequence's. Sums are float32.

    Args:
        x: Rows as projected.
        window: Windows of all slots. After the step, `windows.compact_windows` brings the accepted rows together.
        weight: Taps, the newest last.
        bias: Of each channel.
        slots: Window of each sequence, no window twice.
        num_accepted: Rows that each sequence accepted in its last step, at least 1; entries past the sequences are ignored.
        tree: The trees.
        backend: "eager" or "triton"; default: kernels on a GPU, else PyTorch. Kernels are safe in a CUDA graph.

    Raises:
        ShapeError: operands do not fit the tree or each other.
        UnsupportedError: a dtype or width that kernels do not have.
        BackendError: there is no such backend.

    Source: eq. 10 of docs/theory.md.
    """
    backend = backend or ("triton" if x.is_cuda else "eager")
    newest, places = roll_windows(window, slots, num_accepted, x, tree, weight.shape[1], backend=backend)
    return conv.verify(x, weight, bias, newest, places, tree, backend=backend)
