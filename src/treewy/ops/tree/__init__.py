"""Tables of draft trees, made where the parents are, and root paths read from them."""

from treewy.ops.tree.api import FAULT_BOUNDS, FAULT_PARENT, FAULT_SIZE, empty, paths, tables

__all__ = ["FAULT_BOUNDS", "FAULT_PARENT", "FAULT_SIZE", "empty", "paths", "tables"]
