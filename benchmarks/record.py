"""Result lines: what was measured, by which command, on which code and machine."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "numpy")


def environment(device: str, seed: int | None = None) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a result."""
    sha = os.environ.get("TREEWY_SHA")  # for machines that hold the sources without their history
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sha": sha or _git("rev-parse", "HEAD"),
        "dirty": None if sha else bool(_git("status", "--porcelain", "--untracked-files=no")),
        "argv": ["python", *sys.argv],
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "device": torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"cpu, {torch.get_num_threads()} threads",
        "seed": seed,
    }


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write result lines to benchmarks/results/NAME.jsonl, replacing what was there."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
