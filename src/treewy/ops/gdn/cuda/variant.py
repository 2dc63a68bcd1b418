"""Which variant of the kernel runs: static facts only, so that a captured graph always holds the same one."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from treewy.errors import UnsupportedError
from treewy.ops.nvrtc import Kernel

SOURCE = Path(__file__).parent / "step.cu"
DIM = 128
# Rows of the largest tree that a variant takes; the first is done without shared matrices.
ROW_BUCKETS = (4, 16, 32, 48, 64)
# Prior rows: a history's places and the longest path.
PRIOR_BUCKETS = (16, 32, 48)


class Variant(NamedTuple):
    """Macros of one compiled kernel; `step.cu` explains them."""

    bt: int
    nw: int
    mt: int
    state_f32: int
    u_f32: int
    parts: int
    exact: int
    pmax: int
    min_blocks: int

    def macros(self) -> dict[str, int]:
        """Return the definitions the source needs."""
        return {name.upper(): value for name, value in self._asdict().items()}

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.nw

    @property
    def value_blocks(self) -> int:
        """Blocks that share the values of one head."""
        return DIM // (16 * self.mt * self.nw)


def choose(
    *, max_rows: int, max_prior: int, state: torch.dtype, u: torch.dtype, exact: bool, num_heads: int
) -> Variant:
    """Return the variant for these bounds.

    Args:
        max_rows: Rows of the largest tree.
        max_prior: Most prior rows a sequence can have.
        state: Dtype of the state.
        u: Dtype of pseudo-values in records and histories.
        exact: Whether products keep float32's precision.
        num_heads: Value heads of the whole batch: with few, blocks are small, so that every multiprocessor gets one.

    Raises:
        UnsupportedError: trees or histories are too large.
    """
    wide = state == torch.float32
    bt, pmax = _bucket(max_rows, ROW_BUCKETS, "tree rows"), _bucket(max_prior, PRIOR_BUCKETS, "prior rows")
    nw, mt, min_blocks = _shape(bt, wide=wide, exact=exact, num_heads=num_heads)
    parts = 3 if exact else 2
    return Variant(bt, nw, mt, int(wide), int(u == torch.float32), parts, int(exact), pmax, min_blocks)


def _shape(bt: int, *, wide: bool, exact: bool, num_heads: int) -> tuple[int, int, int]:
    """Return warps, tiles of 16 values per warp, and blocks per multiprocessor to leave registers for."""
    if num_heads <= 64:
        return (8, 1, 1) if bt > 4 else (4, 1, 1)
    if bt == 4:
        return (4, 1, 4) if wide else (4, 2, 4)
    if bt == 16:
        return (8, 1, 2) if wide else (4, 2, 3)
    return (8, 1, 1) if wide or bt == 64 else (8, 1, 2)


def _bucket(needed: int, buckets: tuple[int, ...], what: str) -> int:
    for bucket in buckets:
        if needed <= bucket:
            return bucket
    raise UnsupportedError(
        f"The CUDA kernel takes up to {buckets[-1]} {what}; got {needed}. Use backend='triton' for more."
    )


@lru_cache(maxsize=64)
def kernel(variant: Variant, device: int) -> Kernel:
    """Return the compiled variant for a device, compiling it when first asked for."""
    with torch.cuda.device(device):
        return Kernel(SOURCE.read_text(), "gdn_step", variant.macros(), torch.cuda.get_device_capability(device))
