"""Appending to the histories of all layers in PyTorch, without a loop."""

import torch

from treewy.ops.gdn.checks import check_room
from treewy.ops.gdn.records import StackedHistory, StackedRecord
from treewy.packed import PathTables
from treewy.shapes import Tensor


def append_layers(history: StackedHistory, places: Tensor, record: StackedRecord, path: PathTables) -> None:
    """See `layers.append_layers`."""
    check_room(history, places, path, record.u.shape[1])
    accepted = torch.where(places >= 0, path.lengths, 0)
    seq, step = (torch.arange(path.rows.shape[1], device=places.device) < accepted[:, None]).nonzero(as_tuple=True)
    rows, to = path.rows[seq, step].long(), places[seq].long()
    held = history.lengths[to]
    newest = (held - 1).clamp(min=0)
    before = history.decay_high[:, to, newest].double() + history.decay_low[:, to, newest].double()
    # Masked by value: what an empty history holds is nobody's.
    before = torch.where((held > 0)[:, None], before, 0.0)
    log_decay = before + record.decay_high[:, rows].double() + record.decay_low[:, rows].double()
    high = log_decay.to(history.decay_high.dtype)
    at = slice(None), to, held + step
    history.u[at] = record.u[:, rows].to(history.u.dtype)
    history.k[at] = record.k[:, rows].to(history.k.dtype)
    history.decay_high[at] = high
    history.decay_low[at] = (log_decay - high.double()).to(history.decay_low.dtype)
