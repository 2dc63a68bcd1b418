"""Result lines under benchmarks/results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write result lines to benchmarks/results/NAME.jsonl, replacing what was there."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
