"""What a reader needs to judge or repeat a result: code, command, versions, device."""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy")


def environment(device: torch.device | str, seed: int | None = None, also: Iterable[str] = ()) -> dict[str, Any]:
    """Return date, git SHA and whether the tree was dirty, argv, versions, device and seed.

    `TREEWY_SHA` names the code on machines that hold the sources without their history.

    Args:
        device: What ran it.
        seed: Of what was random.
        also: Further packages whose versions matter, where they are installed.
    """
    sha = os.environ.get("TREEWY_SHA")
    status = None if sha else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sha": sha or _git("rev-parse", "HEAD") or "unknown",
        "dirty": None if status is None else bool(status),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {name: version(name) for name in PACKAGES}
        | _installed(also)
        | {"python": platform.python_version()},
        "device": _device_name(torch.device(device)),
        "seed": seed,
    }


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def _git(*arguments: str) -> str | None:
    """Return what git says of the tree this file is in, or None: an installed package has no history."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
