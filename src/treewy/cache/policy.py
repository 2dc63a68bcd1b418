"""When recurrent states are written: commit policies.

`store_all` keeps the whole state of every row until one is accepted: the baseline every engine starts from.
`reconstruct` keeps pseudo-values, keys and decays, and rebuilds the accepted row's state. `ring` keeps the same and
collects accepted rows in a history, so that the state is written once in many rows. Further policies take the same two
calls.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from treewy.cache.layer import LinearLayer
from treewy.errors import CapacityError, UnsupportedError
from treewy.ops import gdn
from treewy.ops.slots import INERT
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Tensor


class Policy(ABC):
    """How a gated-delta layer verifies a tree and commits a path of it.

    Attributes:
        name: What it is called.
        num_history_rows: Rows of history that its layers hold per slot. A policy without any is shown only layers whose
            histories are empty.
    """

    name: ClassVar[str]
    num_history_rows: int = 0

    @abstractmethod
    def verify(
        self,
        layer: LinearLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        slots: Tensor,
        tree: PackedTree,
        out_dtype: torch.dtype | None,
    ) -> gdn.Verified:
        """Return the outputs and what `commit` will need. Writes nothing to the layer."""

    @abstractmethod
    def commit(self, layer: LinearLayer, slots: Tensor, record: tuple[Tensor, ...], path: PackedPath) -> None:
        """Write the state after each accepted path."""


class StoreAll(Policy):
    """A whole state per row: T snapshots beside the committed one."""

    name = "store_all"

    def verify(self, layer, q, k, v, g, beta, slots, tree, out_dtype):
        """Walk the tree level by level, keeping every state."""
        return gdn.verify_snapshots(q, k, v, g, beta, layer.state, slots, tree, out_dtype=out_dtype)

    def commit(self, layer, slots, record, path):
        """Copy the accepted row's snapshot."""
        gdn.commit_snapshots(layer.state, slots, gdn.Snapshots(*record), path)


class Reconstruct(Policy):
    """A record per row; the accepted row's state is rebuilt at commit."""

    name = "reconstruct"

    def verify(self, layer, q, k, v, g, beta, slots, tree, out_dtype):
        """Solve the whole tree in closed form."""
        return gdn.verify(q, k, v, g, beta, layer.state, slots, tree, out_dtype=out_dtype)

    def commit(self, layer, slots, record, path):
        """Rebuild the accepted row's state from its path's records."""
        gdn.commit(layer.state, slots, gdn.Record(*record), path)


class Ring(Policy):
    """A record per row, and accepted rows in a history that is folded into the state when a path no longer fits.

    Args:
        num_rows: Rows of history per slot. More rows fold less often, take more memory and more work in each verify.
    """

    name = "ring"

    def __init__(self, num_rows: int = 16) -> None:
        if num_rows < 1:
            raise CapacityError(f"A history must hold at least one row; got {num_rows}. Raise num_rows.")
        self.num_history_rows = num_rows

    def verify(self, layer, q, k, v, g, beta, slots, tree, out_dtype):
        """Solve the whole tree in closed form, from state and history."""
        history = _history(layer)
        return gdn.verify(q, k, v, g, beta, layer.state, slots, tree, history=history, out_dtype=out_dtype)

    def commit(self, layer, slots, record, path):
        """Append the path; fold before it where it has no room; write the state where it is longer than any history."""
        history, record = _history(layer), gdn.Record(*record)
        fits = gdn.fits(history, slots, path)
        if not bool(fits.all()):
            gdn.fold(layer.state, torch.where(fits, INERT, slots), history)
            fits = gdn.fits(history, slots, path)
            gdn.commit(layer.state, torch.where(fits, INERT, slots), record, path)
        gdn.append(history, torch.where(fits, slots, INERT), record, path)


def _history(layer: LinearLayer) -> gdn.History:
    if layer.history is None:
        raise UnsupportedError(
            "A step under ring needs layers with a history; this pool was made for another policy and has none. Make the "
            "pool with ring."
        )
    return layer.history


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (StoreAll, Reconstruct, Ring)}


def get_policy(name: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name not in POLICIES:
        raise UnsupportedError(
            f"A commit policy must be one of {', '.join(POLICIES)}; got {name!r}. Choose one of them."
        )
    return POLICIES[name]()
