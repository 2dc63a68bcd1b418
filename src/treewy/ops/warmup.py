"""Compiling before the first step: a graph must not meet a kernel that is not compiled yet."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The modules with kernels. Each offers `warm(facts)`, which launches once, on inert operands, every variant of its
# kernels that a step of these facts can launch.
ROOMS = ("treewy.ops.conv.kernels", "treewy.ops.gdn.kernels", "treewy.ops.gdn.ledger_kernels")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What kernels are compiled for: what a model and its memory fix once. No batch, no tree, no length is among it.

    Attributes:
        device: Where the step runs.
        num_heads: Key heads (H).
        num_value_heads: Value heads (HV).
        key_dim: K.
        value_dim: V.
        dtype: Of activations, weights and convolution windows.
        state_dtype: Of recurrent states.
        conv_width: W.
        conv_bias: Whether the convolution has a bias.
        conv_row_stride: Elements between rows of the convolution's inputs, which may be a view of a wider projection;
            default: its channels.
        index_dtype: Of slots and of lengths of histories.
        gate_dtype: Of the gates' projections; default: `dtype`.
        beta_scale: What the sigmoid of beta is multiplied by.
        exact: Whether the delta rule keeps float32's accuracy.
        max_rows: Rows of the largest tree that any bucket takes.
    """

    device: torch.device | str
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    conv_width: int = 4
    conv_bias: bool = False
    conv_row_stride: int | None = None
    index_dtype: torch.dtype = torch.int64
    gate_dtype: torch.dtype | None = None
    beta_scale: float = 1.0
    exact: bool = False
    max_rows: int = 64

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution (C): those of q, k and v."""
        return 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim


def warmup(facts: Facts, *, rooms: Sequence[str] = ROOMS) -> None:
    """Compile every kernel that steps of these facts launch, so that none compiles during or after capture.

    Triton compiles a kernel anew for other dtypes, for strides that are 1 or divisible by 16 where they were not, and for
    pointers that are divisible by 16 where they were not. Operands laid out unlike `facts` says still compile when they
    first come; memory from PyTorch's allocator and dims that are multiples of 16 never do.
    """
    for room in rooms:
        importlib.import_module(room).warm(facts)
    if torch.device(facts.device).type == "cuda":
        torch.cuda.synchronize(facts.device)
