"""What tests change in vLLM's scheduling, and look at: functions that `engine.Run.prepare` and `probe` name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import probes


def run_ahead() -> None:
    """Schedule each step before the one before it has brought its tokens, as vLLM does on GPUs; on a CPU it never would."""
    platform = import_module("vllm.platforms.cpu").CpuPlatform
    update = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def chains(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `probes.chains`, and beside it whether steps are scheduled ahead."""
    look = probes.chains(worker)
    return lambda: look() | {"ahead": worker.vllm_config.scheduler_config.async_scheduling}
