"""treewy: lossless tree speculative decoding for hybrid LLMs with Gated DeltaNet layers.

Importing the package loads neither torch nor transformers; each name brings what it needs when it is first used.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("treewy")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from treewy import accept, draft, ops
    from treewy.draft import Budget
    from treewy.engine import Engine, Generation, SamplingParams
    from treewy.hf import generate, load
    from treewy.tree import DraftTree

_MODULES = ("accept", "draft", "ops")
_NAMES = {
    "Budget": "treewy.draft",
    "DraftTree": "treewy.tree",
    "Engine": "treewy.engine",
    "Generation": "treewy.engine",
    "SamplingParams": "treewy.engine",
    "generate": "treewy.hf",
    "load": "treewy.hf",
}

__all__ = [
    "Budget",
    "DraftTree",
    "Engine",
    "Generation",
    "SamplingParams",
    "accept",
    "draft",
    "generate",
    "load",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"treewy.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'treewy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
