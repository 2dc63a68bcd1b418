"""Appending accepted paths to the histories of all layers of a model at once."""

from types import ModuleType

import torch

from treewy.errors import ShapeError
from treewy.ops.dispatch import Implementations, select
from treewy.ops.gdn.records import Record, StackedHistory, StackedRecord
from treewy.ops.paths import check_path_shape
from treewy.packed import PathTables
from treewy.shapes import Int, Tensor


def append_layers(
    history: StackedHistory,
    places: Int[Tensor, "B"],
    record: StackedRecord,
    path: PathTables,
    *,
    backend: str | None = None,
) -> None:
    """Add each path's rows of every layer's record to that layer's history, behind the rows it holds, in path order.

    What `append` does for one layer, but `history.lengths` stays as it was, as under `commit_verify`: whoever runs the
    step moves it, once, with `settle` and a `fold` of zeros. Empty paths and place -1 change nothing, bit for bit.

    Args:
        history: Histories of the layers. Log decays of what is added go on from the newest row that is there.
        places: Where each sequence's history lies, no place twice; -1: the sequence is inert.
        record: Records of the step that the paths were accepted in. Its log decays count from the newest row of the
            history. Nothing of it may overlap the histories. Rows may lie anywhere, as where one stretch of bytes holds
            u, k and decays of a row; a kernel copies 16 bytes at a time where heads and rows start on multiples of
            16 elements.
        path: The accepted rows, as rows of the record. No path has more rows than its table.
        backend: "eager" (default), "reference" or "triton": one launch, whatever the number of layers, safe in a CUDA
            graph. A kernel checks nothing that lies on the device: to it a place outside the histories is inert, of a
            path that its history has no room for nothing is appended, and a row that the record lacks counts for one
            that it has.

    Raises:
        ShapeError: operands do not fit each other; a path has a row that its record lacks (eager, reference).
        CapacityError: a place is out of range or taken twice, or a history has no room for its path; none is written
            then (eager, reference).

    Source: eq. 15 of docs/theory.md.
    """
    _check(history, places, record, path)
    _implementation(backend).append_layers(history, places, record, path)


def _implementation(backend: str | None) -> ModuleType:
    from treewy.ops.gdn import layers_eager, layers_reference

    return select(
        "gdn.append_layers", Implementations(layers_eager, layers_reference, "treewy.ops.gdn.layers_kernels"), backend
    )


def _check(history: StackedHistory, places: Tensor, record: StackedRecord, path: PathTables) -> None:
    if history.u.ndim != 5 or history.k.ndim != 5 or record.u.ndim != 4:
        raise ShapeError(
            "A stacked history's u and k must be [layers, slots, rows, heads, dim], and a stacked record's u [layers, rows, "
            f"heads, dim]; got {tuple(history.u.shape)}, {tuple(history.k.shape)} and {tuple(record.u.shape)}. For one layer "
            "use append."
        )
    layers, slots, places_each, value_heads, value_dim = history.u.shape
    heads, key_dim = history.k.shape[3:]
    rows = record.u.shape[1]
    expected = {
        "history.u": (layers, slots, places_each, value_heads, value_dim),
        "history.k": (layers, slots, places_each, heads, key_dim),
        **{f"history.{name}": (layers, slots, places_each, value_heads) for name in Record._fields[2:]},
        "history.lengths": (slots,),
        "record.u": (layers, rows, value_heads, value_dim),
        "record.k": (layers, rows, heads, key_dim),
        **{f"record.{name}": (layers, rows, value_heads) for name in Record._fields[2:]},
    }
    named = {"history": history, "record": record}
    given = {
        f"{owner}.{name}": tuple(part.shape) for owner, parts in named.items() for name, part in parts._asdict().items()
    }
    if given != expected or places_each == 0 or heads == 0 or value_heads % heads:
        raise ShapeError(
            f"Histories must have a row at least and fit the records, {expected}; got {given}. Make both for the same layers."
        )
    if places.ndim != 1:
        raise ShapeError(f"places must be [sequences]; got shape {tuple(places.shape)}. Pass one axis.")
    check_path_shape(path, places.shape[0])
    _check_devices(places, *history, *record, *path)


def _check_devices(places: Tensor, *operands: torch.Tensor) -> None:
    others = {str(operand.device) for operand in operands} - {str(places.device)}
    if others:
        raise ShapeError(
            f"All operands must lie on one device; places are on {places.device} and others on {sorted(others)[0]}. Move "
            "them first."
        )
