"""Planning: the memory of a sequence under each commit policy, and how many fit. Never imports the engine or torch."""

from treewy.planner.catalogue import GPU, find_gpu, gpu_names, model_names
from treewy.planner.memory import POLICIES, RING_CAPACITY, PerSequence, per_sequence
from treewy.planner.model import ModelSpec
from treewy.planner.plan import MEMORY_FRACTION, RESERVE_GIB, Plan, Setting, make_plan
from treewy.planner.source import Source, find_model

__all__ = [
    "GPU",
    "MEMORY_FRACTION",
    "POLICIES",
    "RESERVE_GIB",
    "RING_CAPACITY",
    "ModelSpec",
    "PerSequence",
    "Plan",
    "Setting",
    "Source",
    "find_gpu",
    "find_model",
    "gpu_names",
    "make_plan",
    "model_names",
    "per_sequence",
]
