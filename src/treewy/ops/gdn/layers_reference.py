"""Appending to the histories of all layers, layer by layer and row by row: the definition."""

from treewy.ops.gdn.checks import check_room
from treewy.ops.gdn.records import StackedHistory, StackedRecord
from treewy.ops.gdn.reference import append_rows
from treewy.packed import PathTables
from treewy.shapes import Tensor


def append_layers(history: StackedHistory, places: Tensor, record: StackedRecord, path: PathTables) -> None:
    """See `layers.append_layers`."""
    check_room(history, places, path, record.u.shape[1])
    for place, rows, length in zip(places.tolist(), path.rows.tolist(), path.lengths.tolist(), strict=True):
        if place >= 0:
            for layer in range(history.u.shape[0]):
                append_rows(history.layer(layer), place, record.layer(layer), rows[:length])
