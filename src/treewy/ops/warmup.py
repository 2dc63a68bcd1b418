"""Compiling before the first step: a graph must not meet a kernel that is not compiled yet."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treewy.errors import BackendError
from treewy.ops.launch import interpreted

# The modules that launch kernels. Each offers `warm(facts)`, which launches once, on inert operands, every variant of its
# kernels that a step of these facts can launch.
ROOMS = (
    "treewy.ops.tree.kernels",
    "treewy.ops.conv.kernels",
    "treewy.ops.gdn.kernels",
    "treewy.ops.gdn.cuda.entry",
    "treewy.ops.gdn.ledger_kernels",
    "treewy.ops.gdn.layers_kernels",
    "treewy.ops.attention.kernels",
    "treewy.ops.accept.kernels",
)

# The backends whose kernels run the gated delta rule.
GDN_BACKENDS = ("triton", "cuda")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What kernels are compiled for: what a model, its memory and the buckets of its graphs fix once.

    No tree and no length is among it, and of batches only their bounds.

    Attributes:
        device: Where the step runs.
        num_heads: Key heads (H).
        num_value_heads: Value heads (HV).
        key_dim: K.
        value_dim: V.
        dtype: Of activations, weights, convolution windows, and keys and values of attention.
        state_dtype: Of recurrent states.
        conv_width: W.
        conv_bias: Whether the convolution has a bias.
        conv_row_stride: Elements between rows of the convolution's inputs, which may be a view of a wider projection;
            default: its channels.
        index_dtype: Of slots, and of places of histories and their lengths.
        gate_dtype: Of the gates' projections; default: `dtype`.
        gdn_backend: Whose kernel runs the gated delta rule, "triton" or "cuda".
        exact: Whether the gated delta rule keeps float32's accuracy.
        beta_scale: What the sigmoid of beta is multiplied by.
        history_capacity: Rows that a history has places for (C); 0: there are no histories.
        batch_sizes: Sequences of the buckets (B). Every batch size may come with every row bound.
        row_bounds: Rows of the largest tree that fits a bucket (`max_rows`).
        max_path: Rows that a path has room for (P); default: as many as a tree.
        num_query_heads: Query heads of attention (HQ); 0: the model has none.
        num_kv_heads: KV heads (HK).
        head_dim: Head dim of attention (E).
        page_len: Places of one page.
        max_places: Places of the longest sequence that the block tables can hold.
        table_dtype: Of block tables and of lengths of sequences.
        vocab: Tokens; 0: the step accepts nothing.
        logits_dtype: Default: `dtype`.
        token_dtype: Of draft tokens.
        drawn_dtype: Of the laws that drafts are drawn from; None: they are chosen.
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
    gdn_backend: str = "triton"
    exact: bool = False
    beta_scale: float = 1.0
    history_capacity: int = 0
    batch_sizes: Sequence[int] = (1,)
    row_bounds: Sequence[int] = (16,)
    max_path: int | None = None
    num_query_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    page_len: int = 16
    max_places: int = 16384
    table_dtype: torch.dtype = torch.int32
    vocab: int = 0
    logits_dtype: torch.dtype | None = None
    token_dtype: torch.dtype = torch.int32
    drawn_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.gdn_backend not in GDN_BACKENDS:
            raise BackendError(
                f"Facts must name the kernels of the gated delta rule, {' or '.join(GDN_BACKENDS)}; got "
                f"{self.gdn_backend!r}. Other backends have nothing to compile."
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution (C): those of q, k and v."""
        return 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def record_dtype(self) -> torch.dtype:
        """Dtype of pseudo-values in records and histories, as `gdn.commit_verify` makes them."""
        return torch.bfloat16 if self.state_dtype == torch.bfloat16 and not self.exact else torch.float32

    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        """Bounds of every bucket: sequences, rows of a tree, rows of a path."""
        return [
            (num_seqs, max_rows, max_rows if self.max_path is None else self.max_path)
            for num_seqs in self.batch_sizes
            for max_rows in self.row_bounds
        ]


def warmup(facts: Facts, *, rooms: Sequence[str] = ROOMS) -> None:
    """Compile every kernel that steps of these facts launch, so that none compiles during or after capture.

    Triton compiles a kernel anew for other dtypes, for strides that are 1 or divisible by 16 where they were not, and for
    pointers that are divisible by 16 where they were not. Operands laid out unlike `facts` says still compile when they
    first come; memory from PyTorch's allocator and dims that are multiples of 16 never do.

    Where no kernel can run, on a device that is no GPU and outside Triton's interpreter, there is nothing to compile.

    Raises:
        BackendError: the device is none that PyTorch knows, or a GPU that it does not see.
        ShapeError: bounds or dims that a kernel is not made for.
        UnsupportedError: the same of dtypes, or of what the GPU has room for.
    """
    on_gpu = _device_type(facts) == "cuda"
    if not (on_gpu or interpreted()):
        return
    for room in rooms:
        importlib.import_module(room).warm(facts)
    if on_gpu:
        torch.cuda.synchronize(facts.device)


def _device_type(facts: Facts) -> str:
    try:
        kind = torch.device(facts.device).type
    except RuntimeError as error:
        raise BackendError(
            f"The device must be one that PyTorch knows; got {facts.device!r}. Name the GPU of the step, as 'cuda' or 'cuda:1'."
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"Kernels must be compiled for a GPU that PyTorch sees; got {facts.device!r} and torch {torch.__version__}, which "
            "sees none. Run this on a machine with an NVIDIA GPU and a CUDA build of torch."
        )
    return kind
