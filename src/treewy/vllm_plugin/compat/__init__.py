"""The only importers of vLLM's private names: `names()` is the module of those of the installed version."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from types import ModuleType

from treewy.vllm_plugin.versions import Version, installed

PLATFORMS = ("cuda", "cpu", "rocm", "xpu", "tpu")


def names() -> ModuleType:
    """Return the module of vLLM's private names for the installed version: `v026` before 0.28, else `v032`.

    Versions between the two tested ones have the newer's names; `versions.check` probes them before anything runs.

    Raises:
        UnsupportedError: vLLM is not installed.
    """
    if installed() < Version(0, 28, 0):
        from treewy.vllm_plugin.compat import v026

        return v026
    from treewy.vllm_plugin.compat import v032

    return v032


def engine_arguments() -> type:
    """Return `EngineArgs`, which every front end makes its configuration with: in any version of vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs


def platform() -> str:
    """Return what vLLM runs on: one of `PLATFORMS`, or "other"."""
    from vllm.platforms import current_platform

    return next((name for name in PLATFORMS if getattr(current_platform, f"is_{name}")()), "other")
