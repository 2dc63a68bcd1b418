"""Entry points of acceptance on the device, with their checks."""

from types import ModuleType

import torch

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.accept.records import NO_TOKEN, AcceptedTables, DrawnLaws, Ending, RequestLaws
from treewy.ops.dispatch import Implementations, select
from treewy.ops.tree.api import check_paths, check_written, empty_paths
from treewy.packed import TreeTables
from treewy.shapes import Float, Int, Tensor, lasting

WEIGHTS = (torch.float64, torch.float32)


@lasting
def empty(num_seqs: int, max_path: int, max_rows: int, device: torch.device | str = "cpu") -> AcceptedTables:
    """Return outcomes of no walk, to be written by a captured graph.

    Args:
        num_seqs: Sequences (B).
        max_path: Rows that a path has room for (P).
        max_rows: Rows of the largest tree that fits (T).
        device: Where they live.
    """
    path = empty_paths(num_seqs, max_path, device)
    tokens = torch.full_like(path.rows, NO_TOKEN)
    endings = torch.full_like(path.lengths, int(Ending.NOTHING))
    notes = torch.zeros(num_seqs, max_rows, 3, dtype=torch.float64, device=device)
    return AcceptedTables(path, tokens, endings, torch.zeros_like(endings), notes)


def choices(
    logits: Float[Tensor, "N vocab"],
    *,
    tables: TreeTables | None = None,
    slots: Int[Tensor, "B"] | None = None,
    out: Int[Tensor, "N"] | None = None,
    backend: str | None = None,
) -> Int[Tensor, "N"]:
    """Return the most likely token after each row; ties go to the lowest id.

    -1 where the logits say nothing: a row with a NaN, or whose largest logit is not finite. (`torch.argmax` returns the
    place of the first NaN there.) With `tables`, inert rows are not read and get -1; with `slots`, rows on slot -1 too.

    Args:
        logits: The target's, a row per packed row.
        tables: The trees that the rows belong to.
        slots: Pool slot of each sequence; negative makes its rows inert.
        out: Where to write, int32.
        backend: "eager" (default), "reference" or "triton".
    """
    if slots is not None and tables is None:
        raise ShapeError("slots must come with the tables that say whose rows are whose; got slots alone. Pass tables.")
    if tables is not None:
        _check_rows("logits", logits.shape[0], tables)
        _check_slots(slots, tables)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if out.shape[0] != logits.shape[0]:
        raise ShapeError(f"out must be [{logits.shape[0]}], one token per row; got {tuple(out.shape)}.")
    check_written(out=out)
    _implementation("accept.choices", backend).choices(logits, tables, slots, out)
    return out


def walk_choices(
    tables: TreeTables,
    tokens: Int[Tensor, "N"],
    choices: Int[Tensor, "N"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    max_path: int | None = None,
    out: AcceptedTables | None = None,
    backend: str | None = None,
) -> AcceptedTables:
    """Follow the target's choice at each row as long as a child holds it: `accept.walk_choices`, of a batch.

    Args:
        tables: The trees.
        tokens: Draft token of each row.
        choices: The target's token after each row; a negative one ends the walk before its row.
        slots: Pool slot of each sequence; a negative one gets an empty path.
        max_path: Rows that a path has room for (P); default: `max_rows`. A longer path is cut, as `Accepted.cut` does.
        out: Where to write, as `empty` returns it; its shape stands in for `max_path`.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit each other.
    """
    _check_rows("tokens", tokens.shape[0], tables)
    _check_rows("choices", choices.shape[0], tables)
    _check_slots(slots, tables)
    out = _made(out, tables, max_path)
    _implementation("accept.walk_choices", backend).walk_choices(tables, tokens, choices, slots, out)
    return out


def greedy(
    tables: TreeTables,
    tokens: Int[Tensor, "N"],
    logits: Float[Tensor, "N vocab"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    max_path: int | None = None,
    out: AcceptedTables | None = None,
    out_choices: Int[Tensor, "N"] | None = None,
    backend: str | None = None,
) -> AcceptedTables:
    """Accept the drafts that equal the target's most likely token: `choices`, then `walk_choices`.

    With `out` and `out_choices` nothing is allocated. `sampled` at temperature 0 gives the same and reads only the rows on
    the way, one program per sequence: that is less to read where trees are large.
    """
    chosen = choices(logits, tables=tables, slots=slots, out=out_choices, backend=backend)
    return walk_choices(tables, tokens, chosen, slots=slots, max_path=max_path, out=out, backend=backend)


def sampled(
    tables: TreeTables,
    tokens: Int[Tensor, "N"],
    logits: Float[Tensor, "N vocab"],
    laws: RequestLaws,
    uniforms: Float[Tensor, "B U"],
    *,
    drawn: DrawnLaws | None = None,
    slots: Int[Tensor, "B"] | None = None,
    max_path: int | None = None,
    weights: torch.dtype = torch.float64,
    out: AcceptedTables | None = None,
    backend: str | None = None,
) -> AcceptedTables:
    """Accept drafts so that the tokens follow the target's law: `accept.sampled`, of a batch.

    Each walk takes its numbers in order, one per flip and one per draw, as `accept.choose_sampled` asks its coin: at most
    one per row of the tree, `num_used` in the end. With the numbers of a request's `sampling.Stream` the outcome is that
    of the rule on the host, unless a number lies within rounding of where two outcomes meet.

    A drawn child that its law could not give raises `TreeError` on the host. Kernels cannot raise: there it falls, takes no
    number and changes no law, which leaves the law of the tokens right. A row whose law is none of `drawn.laws` counts
    there as one whose children were chosen.

    Args:
        tables: The trees.
        tokens: Draft token of each row. Siblings in the order in which they were drawn.
        logits: The target's. Of rows that are not on the way nothing is read.
        laws: How each sequence samples; `RequestLaws` says what becomes of values out of range.
        uniforms: Numbers in [0, 1), float32 or float64; at least `max_rows` per sequence.
        drawn: The laws of drawn children; None: all were chosen.
        slots: Pool slot of each sequence; a negative one gets an empty path.
        max_path: Rows that a path has room for (P); default: `max_rows`. A longer path is cut.
        weights: What kernels compute a token's weight in; sums are float64 always. float32 weights are off by up to 2e-6
            of themselves and cost less. The other backends compute in float64.
        out: Where to write, as `empty` returns it; its shape stands in for `max_path`.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit each other.
        RequestError: a value of a law is out of range (eager and reference).
        UnsupportedError: kernels know no such dtype.

    Source: eqs. 20-23 of docs/theory.md.
    """
    _check_rows("tokens", tokens.shape[0], tables)
    _check_rows("logits", logits.shape[0], tables)
    _check_slots(slots, tables)
    if weights not in WEIGHTS:
        raise UnsupportedError(f"weights must be torch.float64 or torch.float32; got {weights}. Leave it out.")
    if {field.shape[0] for field in laws} | {uniforms.shape[0]} != {tables.num_seqs}:
        raise ShapeError(
            f"laws and uniforms must have {tables.num_seqs} sequences; got {[field.shape[0] for field in laws]} and "
            f"{uniforms.shape[0]}. One entry per sequence."
        )
    if uniforms.shape[1] < tables.max_rows:
        raise ShapeError(
            f"uniforms must have at least max_rows={tables.max_rows} numbers per sequence; got {uniforms.shape[1]}. "
            "A walk may take one per row."
        )
    if drawn is not None:
        _check_rows("law_of_row", drawn.law_of_row.shape[0], tables)
        if drawn.laws.shape[1] != logits.shape[1]:
            raise ShapeError(
                f"Drafts must be drawn over the target's {logits.shape[1]} tokens; got laws over {drawn.laws.shape[1]}."
            )
    out = _made(out, tables, max_path)
    implementation = _implementation("accept.sampled", backend)
    implementation.sampled(tables, tokens, logits, laws, uniforms, drawn, slots, weights, out)
    return out


def uniforms(
    keys: Int[Tensor, "B 2"],
    positions: Int[Tensor, "B"],
    num: int,
    *,
    out: Float[Tensor, "B num"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "B num"]:
    """Return the next `num` numbers of each request's `sampling.Stream`, in [0, 1), float64.

    After a step add `num_used` to the positions: the tokens of a seed are then those of the engine on the host.

    Args:
        keys: `sampling.Stream.key` of each, int64.
        positions: Numbers that each stream has given so far, int64.
        num: How many.
        out: Where to write, float64.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: keys, positions and out differ in their requests, or have other dtypes.
    """
    if out is None:
        out = torch.empty(len(positions), num, dtype=torch.float64, device=keys.device)
    if (keys.dtype, positions.dtype, out.dtype) != (torch.int64, torch.int64, torch.float64):
        raise ShapeError(
            f"keys and positions must be int64 and out float64; got {keys.dtype}, {positions.dtype} and {out.dtype}. "
            "Convert them first."
        )
    count = len(positions)
    if tuple(keys.shape) != (count, 2) or positions.ndim != 1 or tuple(out.shape) != (count, num):
        raise ShapeError(
            f"There must be two keys and one position per request, and {num} places in out; got keys {tuple(keys.shape)}, "
            f"positions {tuple(positions.shape)} and out {tuple(out.shape)}. Stack the keys of the requests."
        )
    _implementation("accept.uniforms", backend).uniforms(keys, positions, out)
    return out


def _made(out: AcceptedTables | None, tables: TreeTables, max_path: int | None) -> AcceptedTables:
    room = tables.max_rows if max_path is None else max_path
    if out is None:
        out = empty(tables.num_seqs, room, tables.max_rows, tables.device)
    check_paths(out.path, tables.num_seqs)
    check_written(tokens=out.tokens, endings=out.endings, num_used=out.num_used)
    shapes = out.tokens.shape, out.endings.shape, out.num_used.shape, out.notes.shape
    wanted = out.path.rows.shape, out.path.lengths.shape, out.path.lengths.shape, (tables.num_seqs, tables.max_rows, 3)
    if shapes != wanted or out.notes.dtype != torch.float64 or not out.notes.is_contiguous():
        raise ShapeError(
            f"out must be made for these bounds; got {[tuple(shape) for shape in shapes]}. "
            f"Use empty({tables.num_seqs}, max_path, {tables.max_rows})."
        )
    return out


def _check_rows(name: str, num_rows: int, tables: TreeTables) -> None:
    if num_rows != tables.num_rows:
        raise ShapeError(
            f"{name} must have one row per packed row, {tables.num_rows}; got {num_rows}. Padding rows count."
        )


def _check_slots(slots: Tensor | None, tables: TreeTables) -> None:
    if slots is not None and tuple(slots.shape) != (tables.num_seqs,):
        raise ShapeError(
            f"slots must have {tables.num_seqs} entries; got shape {tuple(slots.shape)}. One per sequence."
        )


def _implementation(op: str, backend: str | None) -> ModuleType:
    from treewy.ops.accept import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.accept.kernels"), backend)
