"""How a launch is cut into programs: from bounds known on the host, never from trees or lengths."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from treewy.errors import UnsupportedError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256

# A program with the blocks for big tiles needs more shared memory than this; GPUs with less get smaller blocks.
BIG_SHARED = 200 * 1024

# Chunks are cut at multiples of this many places, so that tiles of places never straddle two.
GRAIN = 128


class Chunking(NamedTuple):
    """How a prefix is cut into chunks, which are merged in order; the tree belongs to the first.

    What decides is the row's own prefix length and how many (row, query head) pairs of one KV head ask beside it, which
    is its own tree's doing: not the batch, not the longest sequence or the largest tree that a graph is made for.

    A chunk holds `per_pair` places for each pair, at least `least` and at most `most`; or as many more as it takes to need
    no more than `share / pairs` chunks, that number being at least `fewest` and at most `max_chunks`; rounded up to a
    multiple of `GRAIN`.
    """

    least: int
    most: int
    per_pair: int
    fewest: int
    share: int
    max_chunks: int

    def chunk_len(self, length: int, pairs: int) -> int:
        """Return the places per chunk of a prefix beside so many pairs."""
        chunks, places = self._bounds(pairs)
        return -(-max(-(-length // chunks), places) // GRAIN) * GRAIN

    def most_chunks(self, max_places: int, pairs: int) -> int:
        """Return into how many chunks a prefix of at most so many places falls; one if it is empty, for the tree.

        A longer prefix may have fewer chunks than a shorter one, as chunks are rounded up: this bounds them all.
        """
        chunks, places = self._bounds(pairs)
        return max(1, min(chunks, -(-max_places // (-(-places // GRAIN) * GRAIN))))

    def _bounds(self, pairs: int) -> tuple[int, int]:
        """Return the most chunks and the fewest places per chunk."""
        chunks = min(max(self.share // pairs, self.fewest), self.max_chunks)
        return chunks, min(max(self.per_pair * pairs, self.least), self.most)

    def num_parts(self, max_places: int) -> int:
        """Return into how many parts the longest possible row falls, whatever its tree."""
        return min(self.max_chunks, max(1, -(-max_places // self.least)))


# Few pairs: many short chunks, so that a single sequence fills the GPU. Many pairs: few, since a partial sum is written and
# read back per pair and chunk, and tiles of pairs fill the GPU. Shorter chunks than these serve a single sequence better
# and a batch worse, longer ones the other way round: see docs/decisions/0017-chunks-of-a-prefix.md.
CHUNKING = Chunking(least=384, most=1024, per_pair=4, fewest=16, share=4096, max_chunks=32)


class Geometry(NamedTuple):
    """Blocks of the parts' kernel: pairs of (row, query head), places, value columns; and how it is compiled.

    Sums over places run over blocks of `places`, which is the same for every launch of a head dim, dtype and GPU.
    The other fields do not change the order of any sum.
    """

    pairs: int
    places: int
    columns: int
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """What a launch of `verify` is made for: bounds of its buffers.

    Attributes:
        num_seqs: Sequences.
        num_kv_heads: KV heads.
        num_pairs: (row, query head) pairs of the largest tree and one KV head.
        max_places: Places of the longest prefix.
        head_dim: Head dim.
        dtype: Dtype of the operands.
    """

    num_seqs: int
    num_kv_heads: int
    num_pairs: int
    max_places: int
    head_dim: int
    dtype: torch.dtype

    def programs(self, pairs: int) -> int:
        """Return the programs of a launch with tiles of `pairs` pairs, if every sequence is as large as it may be."""
        units = -(-self.num_pairs // pairs) * CHUNKING.most_chunks(self.max_places, max(self.num_pairs, 1))
        return self.num_seqs * self.num_kv_heads * units


class Gpu(NamedTuple):
    """What blocks depend on: bytes of shared memory that one program may have, and how many programs run at once."""

    shared: int
    num_sms: int


def check_operands(dtype: torch.dtype, head_dim: int) -> None:
    """Check what kernels are made for.

    Raises:
        UnsupportedError: a dtype or head dim without a kernel.
    """
    if dtype not in DTYPES or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedError(
            f"Attention kernels must have bfloat16, float16 or float32 operands and a head dim up to {MAX_HEAD_DIM}; got "
            f"{str(dtype).removeprefix('torch.')} and {head_dim}. Use backend='eager'."
        )


def block_of(head_dim: int) -> int:
    """Return the columns of a block that holds a head: a power of two, at least what tensor cores need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def geometry(launch: Launch, gpu: Gpu) -> Geometry:
    """Choose the blocks of a launch.

    Measured on an H200. Tiles of 32 places leave shared memory for four of them beside 128 pairs, so that three are on
    their way; of 64, two fit. A launch of many programs with 64 pairs has two of them on a multiprocessor, which hide each
    other's latencies better than a deeper pipeline does.
    """
    block = block_of(launch.head_dim)
    if launch.dtype == torch.float32:
        # Three tensor-core products for one of float32: registers, not shared memory, bound the tile.
        return Geometry(16, 16, block, num_warps=4, num_stages=3)
    if gpu.shared < BIG_SHARED:
        return Geometry(64, 32, block, num_warps=8, num_stages=3)
    if launch.num_pairs > 64 and 4 * launch.programs(128) >= 3 * gpu.num_sms:
        return Geometry(128, 32, block, num_warps=8, num_stages=7)
    programs = launch.programs(64)
    if programs >= 2 * gpu.num_sms:
        return Geometry(64, 32, block, num_warps=4, num_stages=3)
    return Geometry(64, 32, _columns(block, programs, gpu.num_sms), num_warps=4, num_stages=7)


def _columns(block: int, programs: int, num_sms: int) -> int:
    """Split the value columns in two while that fills more of the GPU; both halves read the same keys.

    Bounds overstate what a step needs, so a quarter too many programs are no reason against it.
    """
    while block > 128 and 8 * programs <= 5 * num_sms:
        block, programs = block // 2, 2 * programs
    return block


def unit_of(*pools: torch.Tensor) -> int:
    """Return how many elements' alignment every row of the pools has, as far as it matters: 16 bytes at most."""
    strides = [stride for pool in pools for stride in pool.stride()[:3]]
    return math.gcd(16 // pools[0].element_size(), *strides)


@lru_cache
def num_units(max_rows: int, group: int, max_places: int, pairs: int, chunking: Chunking) -> int:
    """Return the units of a launch, a tile of pairs beside a chunk each: those of the tree size that has the most."""
    sizes = range(group, group * max_rows + 1, group)
    return max((-(-size // pairs) * chunking.most_chunks(max_places, size) for size in sizes), default=0)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """Return what blocks depend on; the interpreter stands for a small GPU, and elsewhere `launch` refuses."""
    if device.type != "cuda":
        return Gpu(shared=99 * 1024, num_sms=1)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.shared_memory_per_block_optin, properties.multi_processor_count)
