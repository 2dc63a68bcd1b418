"""Acceptance over tables in Triton: what is launched, and with which blocks."""

from typing import NamedTuple

import torch
import triton.language as tl

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.accept.api import WEIGHTS, empty
from treewy.ops.accept.drawing import accept_sampled_kernel
from treewy.ops.accept.philox import accept_uniforms_kernel
from treewy.ops.accept.records import AcceptedTables, DrawnLaws, RequestLaws, request_laws
from treewy.ops.accept.walking import accept_choices_kernel, accept_walk_kernel
from treewy.ops.launch import launch
from treewy.ops.slots import INERT
from treewy.ops.tree.api import empty as empty_trees
from treewy.ops.tree.kernels import check_max_rows, next_power_of_2
from treewy.ops.warmup import Facts
from treewy.packed import TreeTables
from treewy.shapes import Tensor

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
WARPS = 16
# Tokens of a block, and blocks whose loads are in flight together: in a search for the largest logit, and where weights
# of a dtype are summed. Larger ones spill registers.
SEARCH, SUMS = (4096, 8), {torch.float32: (2048, 4), torch.float64: (2048, 2)}
UNIFORMS_BLOCK = 128


class Split(NamedTuple):
    """How a row of the vocabulary is read: `num_chunks` chunks of `num_blocks` blocks of `block` tokens."""

    block: int
    num_blocks: int
    num_chunks: int


def split(vocab: int, block: int, num_blocks: int) -> Split:
    """Return how to read a row of `vocab` tokens, in blocks no larger and no more at once than that."""
    tokens = max(vocab, 1)
    block = min(block, next_power_of_2(tokens))
    num_blocks = min(num_blocks, -(-tokens // block))
    return Split(block, num_blocks, -(-tokens // (block * num_blocks)))


def choices(logits: Tensor, tables: TreeTables | None, slots: Tensor | None, out: Tensor) -> None:
    """See `api.choices`."""
    check_logits(logits)
    vocab = logits.shape[1]
    search = split(vocab, *SEARCH)
    launch(
        accept_choices_kernel,
        (logits.shape[0],),
        logits,
        None if tables is None else tables.seq_of_row,
        _contiguous(slots),
        out,
        logits.stride(0),
        HAS_TABLES=tables is not None,
        HAS_SLOTS=slots is not None,
        V=vocab,
        NC=search.num_chunks,
        U=search.num_blocks,
        BV=search.block,
        num_warps=WARPS,
    )


def walk_choices(
    tables: TreeTables, tokens: Tensor, choices: Tensor, slots: Tensor | None, out: AcceptedTables
) -> None:
    """See `api.walk_choices`."""
    check_max_rows(tables.max_rows)
    room = out.tokens.shape[1]
    launch(
        accept_walk_kernel,
        (tables.num_seqs,),
        *_tree(tables, tokens),
        choices.contiguous(),
        _contiguous(slots),
        *_results(out),
        tables.num_rows,
        room,
        HAS_SLOTS=slots is not None,
        **_sizes(tables.max_rows, room),
        num_warps=1,
    )


def sampled(
    tables: TreeTables,
    tokens: Tensor,
    logits: Tensor,
    laws: RequestLaws,
    uniforms: Tensor,
    drawn: DrawnLaws | None,
    slots: Tensor | None,
    weights: torch.dtype,
    out: AcceptedTables,
) -> None:
    """See `api.sampled`."""
    check_max_rows(tables.max_rows)
    check_logits(logits)
    vocab, room = logits.shape[1], out.tokens.shape[1]
    search, sums = split(vocab, *SEARCH), split(vocab, *SUMS[weights])
    _check_rows_lie_together("uniforms", uniforms)
    if drawn is not None:
        _check_rows_lie_together("laws", drawn.laws)
    launch(
        accept_sampled_kernel,
        (tables.num_seqs,),
        *_tree(tables, tokens),
        logits,
        *(field.contiguous() for field in laws),
        uniforms,
        None if drawn is None else drawn.laws,
        None if drawn is None else drawn.law_of_row.contiguous(),
        _contiguous(slots),
        *_results(out),
        out.notes,
        tables.num_rows,
        room,
        tables.max_rows,
        logits.stride(0),
        uniforms.stride(0),
        0 if drawn is None else drawn.laws.stride(0),
        0 if drawn is None else drawn.laws.shape[0],
        HAS_LAWS=drawn is not None,
        HAS_SLOTS=slots is not None,
        **_sizes(tables.max_rows, room),
        NX=search.num_chunks,
        UX=search.num_blocks,
        BX=search.block,
        V=vocab,
        NC=sums.num_chunks,
        U=sums.num_blocks,
        BV=sums.block,
        BC=next_power_of_2(sums.num_chunks),
        DT=tl.float64 if weights == torch.float64 else tl.float32,
        num_warps=WARPS,
    )


def uniforms(keys: Tensor, positions: Tensor, out: Tensor) -> None:
    """See `api.uniforms`."""
    num_seqs, num = out.shape
    launch(
        accept_uniforms_kernel,
        (num_seqs, -(-num // UNIFORMS_BLOCK)),
        keys.contiguous(),
        positions.contiguous(),
        out,
        num,
        BU=UNIFORMS_BLOCK,
        num_warps=4,
    )


def warm(facts: Facts) -> None:
    """Compile both rules of acceptance and the numbers they take, on sequences without rows or slots.

    What needs a vocabulary is left out without one. Calls without slots are no steps'.
    """
    if not facts.vocab:
        return
    dtype = facts.dtype if facts.logits_dtype is None else facts.logits_dtype
    logits = torch.zeros(1, facts.vocab, dtype=dtype, device=facts.device)
    tokens = torch.zeros(1, dtype=facts.token_dtype, device=facts.device)
    chosen = torch.zeros(1, dtype=torch.int32, device=facts.device)
    for num_seqs, max_rows, max_path in facts.buckets:
        tables = empty_trees(num_seqs, 1, max_rows, facts.device)
        slots = torch.full((num_seqs,), INERT, dtype=facts.index_dtype, device=facts.device)
        out = empty(num_seqs, max_path, max_rows, facts.device)
        choices(logits, tables, slots, chosen)
        walk_choices(tables, tokens, chosen, slots, out)
        keys = torch.zeros(num_seqs, 2, dtype=torch.int64, device=facts.device)
        numbers = torch.zeros(num_seqs, max_rows, dtype=torch.float64, device=facts.device)
        uniforms(keys, keys[:, 0], numbers)
        laws = request_laws([None] * num_seqs, facts.device)
        for drawn in _drawings(facts):
            for weights in WEIGHTS:
                sampled(tables, tokens, logits, laws, numbers, drawn, slots, weights, out)


def _drawings(facts: Facts) -> list[DrawnLaws | None]:
    if facts.drawn_dtype is None:
        return [None]
    laws = torch.zeros(1, facts.vocab, dtype=facts.drawn_dtype, device=facts.device)
    return [None, DrawnLaws(laws, torch.full((1,), -1, dtype=torch.int32, device=facts.device))]


def check_logits(logits: Tensor) -> None:
    """Check that kernels can read these logits.

    Raises:
        UnsupportedError: their dtype is none that kernels read.
        ShapeError: the logits of a row do not lie side by side.
    """
    if logits.dtype not in LOGITS:
        raise UnsupportedError(
            f"Kernels read float32, bfloat16 and float16 logits; got {logits.dtype}. Use backend='eager', or convert."
        )
    _check_rows_lie_together("logits", logits)


def _check_rows_lie_together(name: str, rows: Tensor) -> None:
    if rows.numel() and rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ShapeError(
            f"{name} must lie side by side within a row; got strides {rows.stride()}. Rows may lie apart; columns of a "
            "transposed tensor may not. Call .contiguous()."
        )


def _tree(tables: TreeTables, tokens: Tensor) -> tuple[Tensor, ...]:
    return tables.parents, tables.cu_rows, tables.seq_of_row, tokens.contiguous()


def _results(out: AcceptedTables) -> tuple[Tensor, ...]:
    return out.path.rows, out.tokens, out.path.lengths, out.endings, out.num_used


def _sizes(max_rows: int, room: int) -> dict[str, int]:
    return {"BT": next_power_of_2(max_rows), "BP": next_power_of_2(room)}


def _contiguous(slots: Tensor | None) -> Tensor | None:
    return None if slots is None else slots.contiguous()
