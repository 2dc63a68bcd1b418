"""The causal convolution of a chain over vLLM's rolling window, in PyTorch: for devices without vLLM's kernel."""

import torch
from torch.nn import functional

from treewy.shapes import Float, Int, Tensor


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
