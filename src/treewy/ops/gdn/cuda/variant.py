"""Which variant of the kernel runs: static facts only, so that a captured graph always holds the same one."""

from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from treewy.errors import UnsupportedError
from treewy.ops.nvrtc import Kernel

# The kernel's source, in the order in which it is read.
PARTS = (
    "params",
    "instructions",
    "work",
    "prior",
    "gates",
    "small",
    "trees",
    "triangle",
    "read",
    "solve",
    "wide",
    "step",
)
DIM = 128
# Elements from row to row of 128 in shared memory: no two rows of a matrix operand meet in a bank.
PADDED = 136
# Rows of the largest tree that a variant takes; the first is done without shared matrices.
ROW_BUCKETS = (4, 16, 32, 48, 64)
# Prior rows: a history's places and the longest path.
PRIOR_BUCKETS = (16, 32, 48, 64, 80)


# With at most so many value heads in the batch, blocks are small, and each has a multiprocessor for itself.
FEW_HEADS = 64
# Shared memory that a multiprocessor keeps for itself, per block; and how many warps leave each the registers it needs.
RESERVED = 1024
MOST_WARPS = 16


class Variant(NamedTuple):
    """Macros of one compiled kernel; `params.cuh` explains them."""

    bt: int
    nw: int
    mt: int
    state_f32: int
    u_f32: int
    parts: int
    exact: int
    pmax: int
    min_blocks: int
    lean: int = 0
    stages: int = 4

    def macros(self) -> dict[str, int]:
        """Return the definitions the source needs."""
        macros = {name.upper(): value for name, value in self._asdict().items()}
        return macros | {"SHARED_BYTES": self.shared_bytes}

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the source's `Tile` and `Rest`, which asserts that it is this."""
        values, bt = 16 * self.mt * self.nw, self.bt
        state, u, part = 4 if self.state_f32 else 2, 4 if self.u_f32 else 2, 4 if self.exact else 2
        triangle = bt // 16 * (bt // 16 + 1) // 2 * 16  # rows of its blocks
        system, apart = triangle * 20 * 4, bt <= 32 or not self.lean
        states = PADDED * values * state
        if not apart:  # it lies where the state comes later
            states = max(states, system)
        tile = states + PADDED * 2 * (2 * bt + self.pmax) + self.pmax * (values * u + 16)
        small = self.nw * 64 * 4 + 4 * (values + 8) * 2
        if bt == ROW_BUCKETS[0]:
            return _aligned(tile) + _aligned(small)
        matrices = triangle * 2 * (20 * 4 if self.exact else 24 * 2) + 2 * bt * (self.pmax + 8) * part
        if apart:
            matrices += system
        held = bt * (values + 8) * 2 if bt <= 32 and not self.lean else 0
        tables = 32 * -(-self.pmax // 32) * 4 + bt * 8 * 4 + 7 * 4
        return _aligned(tile) + max(_aligned(small), _aligned(matrices + held + tables))

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.nw

    @property
    def value_blocks(self) -> int:
        """Blocks that share the values of one head."""
        return DIM // (16 * self.mt * self.nw)


def choose(
    *, max_rows: int, max_prior: int, state: torch.dtype, u: torch.dtype, exact: bool, num_heads: int, shared_limit: int
) -> Variant:
    """Return the variant for these bounds.

    Args:
        max_rows: Rows of the largest tree.
        max_prior: Most prior rows a sequence can have.
        state: Dtype of the state.
        u: Dtype of pseudo-values in records and histories.
        exact: Whether products keep float32's precision.
        num_heads: Value heads of the whole batch: with few, blocks are small, so that every multiprocessor gets one.
        shared_limit: Bytes of shared memory that a block may have; less picks smaller blocks.

    Raises:
        UnsupportedError: trees or histories are too large, for the kernel or for the shared memory.
    """
    wide = state == torch.float32
    bt, pmax = _bucket(max_rows, ROW_BUCKETS, "tree rows"), _bucket(max_prior, PRIOR_BUCKETS, "prior rows")
    parts = 3 if exact else 2
    variants = [
        Variant(bt, nw, mt, int(wide), int(u == torch.float32), parts, int(exact), pmax, min_blocks)
        for nw, mt, min_blocks in _shapes(bt, wide=wide, num_heads=num_heads)
    ]
    if num_heads > FEW_HEADS:
        variants = [_leaner(variant, shared_limit) for variant in variants]
    else:  # one block a multiprocessor: lean only where nothing else fits
        variants += [variant._replace(lean=1) for variant in variants]
    for variant in variants:
        if variant.shared_bytes <= shared_limit:
            return variant
    variant = variants[-1]
    raise UnsupportedError(
        f"The CUDA kernel must have {variant.shared_bytes} bytes of shared memory a block for trees of {max_rows} rows; "
        f"this device gives {shared_limit}. Use backend='triton', or smaller trees."
    )


def _shapes(bt: int, *, wide: bool, num_heads: int) -> list[tuple[int, int, int]]:
    """Return warps, tiles of 16 values per warp, and blocks per multiprocessor to leave registers for; the fastest first."""
    smaller = [(4, 1, 1), (2, 1, 1)] if bt > 32 else [(4, 1, 1), (2, 1, 1), (1, 1, 1)]
    if num_heads <= FEW_HEADS:
        return [(8, 1, 1) if bt > 4 else (4, 1, 1), *smaller]
    if bt == 4:
        return [(4, 1, 4) if wide else (4, 2, 4), *smaller]
    if bt == 16:
        return [(8, 1, 2) if wide else (4, 2, 3), *smaller]
    return [(8, 1, 1), *smaller]


def _leaner(variant: Variant, shared_limit: int) -> Variant:
    """Return the variant, lean where that lets more blocks share a multiprocessor, with registers for all of them."""
    blocks, lean_blocks = (
        min((shared_limit + RESERVED) // (one.shared_bytes + RESERVED), MOST_WARPS // one.nw)
        for one in (variant, variant._replace(lean=1))
    )
    if variant.bt > ROW_BUCKETS[0] and lean_blocks > blocks:
        return variant._replace(lean=1, min_blocks=lean_blocks)
    wanted = blocks if variant.bt > 32 else min(variant.min_blocks, blocks)
    return variant._replace(min_blocks=max(wanted, 1))


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _bucket(needed: int, buckets: tuple[int, ...], what: str) -> int:
    for bucket in buckets:
        if needed <= bucket:
            return bucket
    raise UnsupportedError(
        f"The CUDA kernel takes up to {buckets[-1]} {what}; got {needed}. Use backend='triton' for more."
    )


@cache
def source() -> str:
    """Return the kernel's source as one text: NVRTC gets no headers."""
    folder = Path(__file__).parent
    names = [f"{part}.cuh" for part in PARTS[:-1]] + [f"{PARTS[-1]}.cu"]
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in names)


@lru_cache(maxsize=64)
def kernel(variant: Variant, device: int) -> Kernel:
    """Return the compiled variant for a device, compiling it when first asked for."""
    with torch.cuda.device(device):
        capability = torch.cuda.get_device_capability(device)
        return Kernel(source(), "gdn_step", variant.macros(), capability, variant.shared_bytes)
