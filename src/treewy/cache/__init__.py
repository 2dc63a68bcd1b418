"""What a sequence remembers: recurrent states, conv windows, keys and values, and how they are committed."""

from treewy.cache.layer import AttentionSpec, LayerSpec, LinearSpec
from treewy.cache.policy import POLICIES, Policy, get_policy
from treewy.cache.pool import CachePool
from treewy.cache.step import Batch, Pending, Step

__all__ = [
    "POLICIES",
    "AttentionSpec",
    "Batch",
    "CachePool",
    "LayerSpec",
    "LinearSpec",
    "Pending",
    "Policy",
    "Step",
    "get_policy",
]
