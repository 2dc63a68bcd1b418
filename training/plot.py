"""Plot training/curves.jsonl to training/curves.png.

python training/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "curves.jsonl").read_text().splitlines()]
    tokens = [row["tokens"] / 1e6 for row in rows]
    fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(tokens, [row["trunk"] for row in rows], label="trunk")
    for j in range(3):
        left.plot(tokens, [row["hard"][j] for row in rows], lw=0.8, label=f"MTP step {j + 1}")
        right.plot(tokens, [row["agree"][j] for row in rows], lw=0.8, label=f"MTP step {j + 1}")
    left.set(xlabel="tokens (millions)", ylabel="training loss, nats per token", ylim=(1.9, 5))
    right.set(xlabel="tokens (millions)", ylabel="top-1 agreement with the trunk", ylim=(0.4, 0.75))
    left.legend(frameon=False, fontsize=7)
    right.legend(frameon=False, fontsize=7)
    fig.savefig(HERE / "curves.png", dpi=100)


if __name__ == "__main__":
    main()
