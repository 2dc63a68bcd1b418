"""The serving entry of the gated delta rule in CUDA C++: K = V = 128, bfloat16 rows, trees of up to 64 rows."""

from treewy.ops.gdn.cuda.entry import commit_verify

__all__ = ["commit_verify"]
