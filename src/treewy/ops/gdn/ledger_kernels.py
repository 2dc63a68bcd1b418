"""Bookkeeping of histories in Triton: one small launch each."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from treewy.ops.launch import launch
from treewy.ops.warmup import Facts
from treewy.shapes import Tensor

# Sequences of one program.
BLOCK = 128

# Nothing here is worth a variant of its own.
INTEGERS = ["num_slots", "num_seqs", "capacity", "stride_lengths", "stride_slots", "stride_path", "stride_fold"]
POINTERS = ["p_lengths", "p_slots", "p_path", "p_fold"]


# The import hook of the tests must not wrap what Triton compiles.
@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
@no_type_check
def choose_folds_kernel(
    p_fold,
    p_lengths,
    p_slots,
    p_path,
    num_seqs,
    num_slots,
    capacity,
    stride_fold,
    stride_lengths,
    stride_slots,
    stride_path,
    BLOCK: tl.constexpr,
):
    """Write 1 where a history and its path are longer than the capacity."""
    o_seq = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m_seq = o_seq < num_seqs
    b_slot = tl.load(p_slots + o_seq * stride_slots, mask=m_seq, other=-1).to(tl.int64)
    m_live = (b_slot >= 0) & (b_slot < num_slots)
    b_held = tl.load(p_lengths + b_slot * stride_lengths, mask=m_live, other=0).to(tl.int64)
    b_path = tl.load(p_path + o_seq * stride_path, mask=m_live, other=0)
    b_fold = b_held + b_path > capacity
    tl.store(p_fold + o_seq * stride_fold, b_fold.to(p_fold.dtype.element_ty), mask=m_seq)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
@no_type_check
def settle_kernel(
    p_lengths,
    p_slots,
    p_path,
    p_fold,
    num_seqs,
    num_slots,
    stride_lengths,
    stride_slots,
    stride_path,
    stride_fold,
    BLOCK: tl.constexpr,
):
    """Bring the lengths of the sequences' slots to 0 where folded, and up by the path elsewhere."""
    o_seq = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    b_slot = tl.load(p_slots + o_seq * stride_slots, mask=o_seq < num_seqs, other=-1).to(tl.int64)
    m_live = (b_slot >= 0) & (b_slot < num_slots)
    p_length = p_lengths + b_slot * stride_lengths
    b_held = tl.load(p_length, mask=m_live, other=0).to(tl.int64)
    b_path = tl.load(p_path + o_seq * stride_path, mask=m_live, other=0)
    b_fold = tl.load(p_fold + o_seq * stride_fold, mask=m_live, other=0)
    b_length = tl.where(b_fold != 0, 0, b_held + b_path)
    tl.store(p_length, b_length.to(p_lengths.dtype.element_ty), mask=m_live)


def choose_folds(lengths: Tensor, slots: Tensor, path_lengths: Tensor, capacity: int, out: Tensor) -> None:
    """See `ledger.choose_folds`."""
    operands = (out, lengths, slots, path_lengths)
    sizes = (slots.shape[0], lengths.shape[0], capacity)
    launch(choose_folds_kernel, _grid(slots), *operands, *sizes, *(x.stride(0) for x in operands), BLOCK=BLOCK)


def settle(lengths: Tensor, slots: Tensor, path_lengths: Tensor, fold: Tensor) -> None:
    """See `ledger.settle`."""
    operands = (lengths, slots, path_lengths, fold)
    sizes = (slots.shape[0], lengths.shape[0])
    launch(settle_kernel, _grid(slots), *operands, *sizes, *(x.stride(0) for x in operands), BLOCK=BLOCK)


def warm(facts: Facts) -> None:
    """Compile both kernels, on a sequence without a slot."""
    lengths = torch.zeros(1, dtype=facts.index_dtype, device=facts.device)
    slots = torch.full((1,), -1, dtype=facts.index_dtype, device=facts.device)
    path_lengths, fold = torch.zeros(2, 1, dtype=torch.int32, device=facts.device)
    choose_folds(lengths, slots, path_lengths, 0, fold)
    settle(lengths, slots, path_lengths, fold)


def _grid(slots: Tensor) -> tuple[int]:
    return (-(-slots.shape[0] // BLOCK),)
