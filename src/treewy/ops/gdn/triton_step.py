"""The kernel of the gated delta rule: prior rows folded, read or appended, then one tree solved, per value head."""
# pyright: reportGeneralTypeIssues=false
# Nested ifs ask what is known when the kernel compiles before what is not.
# ruff: noqa: SIM102

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.gdn import triton_prior as prior
from treewy.ops.gdn import triton_rows as solving
from treewy.ops.gdn import triton_state as reading
from treewy.ops.gdn.triton_state import ALWAYS, BY_TABLE, NEVER

L2_EPS = tl.constexpr(1e-6)


# The import hook of the tests must not wrap what Triton compiles: hence no_type_check throughout.
@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_rows",
        "max_rows",
        "num_slots",
        "num_places",
        "num_words",
        "path_width",
        "capacity",
        "num_record_rows",
    ],
    do_not_specialize_on_alignment=[
        "slots",
        "cu_rows",
        "ancestors",
        "path_rows",
        "path_lengths",
        "fold",
        "held",
        "places",
    ],
)
@no_type_check
def gdn_step(
    state,
    slots,
    x,
    cu_rows,
    ancestors,
    out,
    record,
    history,
    pending,
    path_rows,
    path_lengths,
    fold,
    held,
    places,
    num_seqs,
    num_rows,
    max_rows,
    num_slots,
    num_places,
    num_words,
    path_width,
    num_record_rows,
    capacity,
    size,
):
    """Do the step of one sequence, one value head and BV of its value channels; the last programs zero rows outside the trees.

    Without `x` the step is that of the prior rows alone. There are path tables where there is a `pending` record.
    """
    pid = tl.program_id(0)
    i_v, i_hv = pid % tl.cdiv(size.V, size.BV), pid // tl.cdiv(size.V, size.BV) % size.HV
    i_b = pid // tl.cdiv(size.V, size.BV) // size.HV
    o_v = tl.arange(0, size.BV) + i_v * size.BV
    i_slot = tl.load(slots + i_b, mask=i_b < num_seqs, other=-1).to(tl.int64)
    live = (i_slot >= 0) & (i_slot < num_slots)
    i_place = tl.load(places + i_b, mask=i_b < num_seqs, other=-1)
    i_place = tl.where((i_place >= 0) & (i_place < num_places), i_place, -1).to(tl.int32)
    at = i_b, i_slot, i_hv // (size.HV // size.H), i_hv, i_place
    past = history, pending, (path_rows, path_lengths, path_width, num_record_rows)
    if x is None:
        if live:
            commit_prior(state, past, fold, held, capacity, at, i_v, o_v, size)
    else:
        first = tl.load(cu_rows + i_b).to(tl.int32)
        end = tl.load(cu_rows + i_b + 1, mask=i_b < num_seqs, other=0).to(tl.int32)
        if live:
            last = tl.minimum(end, first + max_rows)
            tree = ancestors, num_words, first, last
            verify_tree(state, x, tree, out, record, past, fold, held, capacity, at, i_v, o_v, size)
            zero_rows(out, last, end, i_hv, o_v, size)
        else:
            zero_rows(out, first, tl.where(i_b < num_seqs, end, num_rows), i_hv, o_v, size)
            if i_b == num_seqs:
                zero_rows(out, tl.full([], 0, tl.int32), tl.load(cu_rows).to(tl.int32), i_hv, o_v, size)


@triton.jit
@no_type_check
def zero_rows(out, first, end, i_hv, o_v, size):
    """Write zeros to the outputs of rows from `first` to `end`, which are no part of a live tree."""
    zeros = tl.zeros([16, size.BV], dtype=out.p.dtype.element_ty)
    while first < end:
        rows = first + tl.arange(0, 16)
        p_o = out.p + rows.to(tl.int64)[:, None] * out.row + i_hv * size.V + o_v[None, :]
        tl.store(p_o, zeros, mask=(rows < end)[:, None] & (o_v < size.V)[None, :])
        first += 16


@triton.jit
@no_type_check
def counts(past, held, capacity, at):
    """Return how many rows the history and the path have, as many as fit their tables; `held` has the former, or is None."""
    num_kept, num_accepted = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if past[0] is not None:
        p_kept = past[0].lengths + at[4] if held is None else held + at[0]
        num_kept = tl.maximum(0, tl.minimum(tl.load(p_kept, mask=at[4] >= 0, other=0), capacity)).to(tl.int32)
    if past[1] is not None:
        num_accepted = tl.maximum(0, tl.minimum(tl.load(past[2][1] + at[0]), past[2][2])).to(tl.int32)
    return num_kept, num_accepted


@triton.jit
@no_type_check
def whether_folds(fold, count, at, size):
    """Return whether this sequence has prior rows that go into the state; they all do where it has no history."""
    folds = count[0] + count[1] > 0
    if size.fold == BY_TABLE:
        folds = folds & ((tl.load(fold + at[0]) != 0) | (at[4] < 0))
    if size.fold == NEVER:
        folds = folds & (count[0] < 0)
    return folds


@triton.jit
@no_type_check
def append_path(past, newest, capacity, at, count, folds, i_v, o_v, size):
    """Append the path to the history of a sequence that does not fold, if there is room."""
    if past[0] is not None and past[1] is not None and size.fold != ALWAYS:
        if (count[1] > 0) & (count[0] + count[1] <= capacity) & (folds == 0):
            leads = (i_v == 0) & (at[3] % (size.HV // size.H) == 0), i_v == 0
            prior.append(past, newest, at, count, o_v, leads, size)


@triton.jit
@no_type_check
def commit_prior(state, past, fold, held, capacity, at, i_v, o_v, size):
    """Fold or append the prior rows of a live sequence."""
    count = counts(past, held, capacity, at)
    folds = whether_folds(fold, count, at, size)
    newest = prior.newest_decays(past, at, count, size)
    append_path(past, newest, capacity, at, count, folds, i_v, o_v, size)
    if size.fold != NEVER:
        if folds:
            reading.fold_all(state, past, newest, at, count, o_v, size)


@triton.jit
@no_type_check
def grams(x, i_h, first, m_row, size):
    """Return k . k and q . k of all rows, and what makes keys and queries unit length, times the queries' scale."""
    keys_keys = tl.zeros([size.BT, size.BT], dtype=tl.float32)
    queries_keys = tl.zeros([size.BT, size.BT], dtype=tl.float32)
    key_squares, query_squares = tl.zeros([size.BT], dtype=tl.float32), tl.zeros([size.BT], dtype=tl.float32)
    for i_k in tl.range(0, size.K // size.BK, loop_unroll_factor=2):
        b_q = reading.row_block(x.q + i_h * x.q_head, x.q_row, first, m_row, i_k, size)
        b_k = reading.row_block(x.k + i_h * x.k_head, x.k_row, first, m_row, i_k, size)
        keys_keys += reading.product(b_k, tl.trans(b_k), size, size.gram_precision)
        queries_keys += reading.product(b_q, tl.trans(b_k), size, size.gram_precision)
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        key_squares += tl.sum(b_k * b_k, axis=1)
        query_squares += tl.sum(b_q * b_q, axis=1)
    if size.finished:
        key_norms, query_norms = tl.full([size.BT], 1.0, tl.float32), tl.full([size.BT], 1.0, tl.float32)
    else:
        key_norms = tl.div_rn(1.0, tl.sqrt_rn(key_squares + L2_EPS))
        query_norms = tl.div_rn(1.0, tl.sqrt_rn(query_squares + L2_EPS))
    return keys_keys, queries_keys, key_norms, query_norms * size.scale


@triton.jit
@no_type_check
def verify_tree(state, x, tree, out, record, past, fold, held, capacity, at, i_v, o_v, size):
    """Do the step of a live sequence: eqs. 5-8 and 13-15 of docs/theory.md."""
    ancestors, num_words, first, end = tree
    # Before anything else, so that the state is on its way while the rows are solved among themselves.
    blocks = None
    if size.K <= 2 * size.BK:
        blocks = reading.load_state(state, at, o_v, size)
    count = counts(past, held, capacity, at)
    folds = whether_folds(fold, count, at, size)
    newest = prior.newest_decays(past, at, count, size)
    append_path(past, newest, capacity, at, count, folds, i_v, o_v, size)

    o_t = tl.arange(0, size.BT)
    m_t = o_t < end - first
    first = first.to(tl.int64)
    keys_keys, queries_keys, key_norms, query_norms = grams(x, at[2], first, m_t, size)
    b_g, b_beta = solving.gates(x, first, m_t, at[3], size)
    m_ancestors = solving.ancestor_mask(ancestors, num_words, first, m_t, size.BT)
    m_strict = m_ancestors & (o_t[:, None] != o_t[None, :])
    coarse, fine = solving.path_sums(b_g, m_ancestors)
    ratios = solving.decay_ratios(coarse, fine, m_ancestors) * key_norms[None, :]
    # Masked by value: what is not finite in another branch stays there.
    couplings = tl.where(m_strict, (b_beta * key_norms)[:, None] * ratios * keys_keys, 0.0)
    scores = tl.where(m_ancestors, query_norms[:, None] * ratios * queries_keys, 0.0)

    # Channels first, so that the state is the left operand: its tiles are the large ones.
    read_keys, read_queries = reading.read_state(
        blocks, x, state, past, newest, at, count, folds, o_v, first, m_t, size
    )
    if size.fold != ALWAYS and past[0] is not None:
        if (folds == 0) & (count[0] + count[1] > 0):
            carried = tl.exp((newest[0] + newest[2]) + (newest[1] + newest[3]))
            prior_keys, prior_queries = reading.read_prior(x, past, newest, at, count, o_v, first, m_t, size)
            read_keys = carried * read_keys + prior_keys
            read_queries = carried * read_queries + prior_queries

    carried = tl.exp(coarse + fine)
    m_o = (o_v < size.V)[:, None] & m_t[None, :]
    b_v = tl.load(
        x.v + at[3] * x.v_head + first * x.v_row + (o_t[None, :] * x.v_row + o_v[:, None]), mask=m_o, other=0.0
    ).to(tl.float32)
    residual = b_beta[None, :] * (b_v - (carried * key_norms)[None, :] * read_keys)
    # What is no part of a tree is not its own ancestor either.
    m_tree = tl.max(tl.where(o_t[:, None] == o_t[None, :], m_ancestors, 0).to(tl.int32), axis=1) > 0
    residual = tl.where(m_tree[None, :], residual, 0.0)
    # 0 * NaN is NaN: a row that is not finite and its descendants leave every product, and get NaN at the end.
    bad = tl.max(tl.where(tl.abs(residual) < float("inf"), 0, 1), axis=0)
    tainted = tl.max(tl.where(m_ancestors, bad[None, :], 0), axis=1) > 0
    couplings = tl.where(tainted[:, None], 0.0, couplings)
    residual = tl.where(tainted[None, :], 0.0, residual)
    # The identity is added after the product, so that what a row has of itself is exact whatever the precision.
    others = solving.inverse_less_one(couplings, m_strict, size.BT)
    b_u = residual + solving.lower_product(residual, others, size)
    b_o = (carried * query_norms)[None, :] * read_queries
    b_o += solving.lower_product(b_u, scores, size)
    b_o = tl.where(m_tree[None, :], b_o, 0.0)
    nan = float("nan")
    p_o = out.p + first * out.row + (o_t[None, :] * out.row + o_v[:, None] + at[3] * size.V)
    tl.store(p_o, tl.where(tainted[None, :], nan, b_o).to(out.p.dtype.element_ty), mask=m_o)
    p_u = record.u + first * record.u_row + (o_t[None, :] * record.u_row + o_v[:, None] + at[3] * size.V)
    b_u = tl.where(tainted[None, :], nan, b_u * key_norms[None, :])
    tl.store(p_u, b_u.to(record.u.dtype.element_ty), mask=m_o)
    record_row(x, record, at, i_v, coarse, fine, first, m_t, size)


@triton.jit
@no_type_check
def record_row(x, record, at, i_v, coarse, fine, first, m_row, size):
    """Write the decays of a value head's rows, and the keys of a key head's; one program each."""
    if i_v == 0:
        high, low = solving.two_sum(coarse, fine)
        o_t = tl.arange(0, size.BT)
        tl.store(record.high + first * record.high_row + at[3] + o_t * record.high_row, high, mask=m_row)
        tl.store(record.low + first * record.low_row + at[3] + o_t * record.low_row, low, mask=m_row)
        if at[3] % (size.HV // size.H) == 0:
            for i_k in tl.range(0, size.K // size.BK, loop_unroll_factor=2):
                b_k = reading.row_block(x.k + at[2] * x.k_head, x.k_row, first, m_row, i_k, size)
                o_k = (tl.arange(0, size.BK) + i_k * size.BK + at[2] * size.K)[None, :]
                p_k = record.k + first * record.k_row + (o_t[:, None] * record.k_row + o_k)
                tl.store(p_k, b_k.to(record.k.dtype.element_ty), mask=m_row[:, None])


@triton.jit
@no_type_check
def gdn_lengths(lengths, slots, path_lengths, num_seqs, num_slots, BLOCK: tl.constexpr):
    """Move the lengths of histories: by the paths that were appended, or to 0 where `path_lengths` is None."""
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_slot = tl.load(slots + o_b, mask=o_b < num_seqs, other=-1).to(tl.int64)
    live = (i_slot >= 0) & (i_slot < num_slots)
    if path_lengths is None:
        after = tl.zeros([BLOCK], dtype=lengths.dtype.element_ty)
    else:
        after = tl.load(lengths + i_slot, mask=live, other=0)
        after += tl.load(path_lengths + o_b, mask=live, other=0).to(lengths.dtype.element_ty)
    tl.store(lengths + i_slot, after, mask=live)
