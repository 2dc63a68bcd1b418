"""Choose the held-out prompts: 10 of prose, 10 of code, 40-120 tokens each, from different held-out documents.

python training/prompts.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).parent


def cut_at(text: str, start: int, tokenizer: Tokenizer, tokens: int) -> str:
    """About `tokens` tokens of text from `start`, ending after a whole word (prose and code alike)."""
    ids = tokenizer.encode(text[start : start + 2000]).ids[:tokens]
    piece = tokenizer.decode(ids)
    return piece[: max(piece.rfind(" "), piece.rfind("\n"))].rstrip()


def starts(text: str, kind: str) -> list[int]:
    """Places where a paragraph of running prose, or a definition, begins."""
    found, at = [], 0
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        prose = len(block) > 300 and block[:1].isupper() and block.count(". ") >= 2 and len(lines) <= 12
        code = lines[0].lstrip().startswith(("def ", "class ", "@")) and len(block) > 150
        if (prose if kind == "prose" else code) and len(text) - at > 1200:
            found.append(at)
        at += len(block) + 2
    return found


def main() -> None:
    rng = random.Random(3)
    tokenizer = Tokenizer.from_file(str(HERE.parent / "src/treewy/assets/checkpoint/tokenizer.json"))
    rows = []
    for kind in ("prose", "code"):
        documents = (HERE / "heldout" / f"{kind}.txt").read_text().split("\f")
        usable = [d for d in documents if starts(d, kind)]
        chosen = (rng.sample(usable, len(usable)) * 3)[:10]
        seen: set[tuple[str, int]] = set()
        for i, document in enumerate(chosen):
            places = starts(document, kind)
            start = rng.choice([s for s in places if (document, s) not in seen] or places)
            seen.add((document, start))
            text = cut_at(document, start, tokenizer, rng.randint(45, 115))
            rows.append({"id": f"{kind}-{i:02d}", "kind": kind, "text": text})
    path = HERE.parent / "benchmarks/prompts/heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps({r["id"]: len(tokenizer.encode(r["text"]).ids) for r in rows}))


if __name__ == "__main__":
    main()
