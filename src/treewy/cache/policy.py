"""When recurrent states are written: commit policies.

`store_all` keeps the whole state of every row until one is accepted: the baseline every engine starts from.
`reconstruct` keeps pseudo-values, keys and decays, and rebuilds the accepted row's state. Further policies take the
same two calls.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from treewy.cache.layer import LinearLayer
from treewy.errors import UnsupportedError
from treewy.ops import gdn
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Tensor


class Policy(ABC):
    """How a gated-delta layer verifies a tree and commits a path of it."""

    name: ClassVar[str]

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


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (StoreAll, Reconstruct)}


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
