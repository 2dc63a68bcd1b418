"""Train the byte-level BPE tokenizer and write the packed token streams.

python training/tokenizer.py --work /tmp/corpus --out src/treewy/assets/checkpoint --tokens .carry
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
# Qwen2's split, except that line breaks keep the indentation after them and are not taken by punctuation before them.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+ *|\s+(?!\S)|\s+"


def new_tokenizer() -> Tokenizer:
    """An empty byte-level BPE tokenizer; every byte string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sample(work: Path, size: int, rng: random.Random) -> list[str]:
    """About `size` characters of training documents, half prose, half code."""
    docs = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    texts: list[str] = []
    for kind in ("prose", "code"):
        total, pool = 0, [d for d in docs if d["kind"] == kind]
        order = sorted(pool, key=lambda d: rng.random() ** (1 / d["weight"]), reverse=True)
        for doc in order:
            if total > size // 2:
                break
            total += len(doc["text"])
            texts.append(doc["text"])
    return texts


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        show_progress=False,
        max_token_length=16,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 4096,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def streams(tokenizer: Tokenizer, work: Path, rng: random.Random) -> Iterator[tuple[int, np.ndarray, int]]:
    """Per document weight: weight, shuffled documents joined by the end-of-text token, their bytes."""
    docs = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    rng.shuffle(docs)
    eos = tokenizer.token_to_id(EOS)
    for weight in sorted({d["weight"] for d in docs}):
        texts = [d["text"] for d in docs if d["weight"] == weight]
        parts: list[np.ndarray] = []
        for start in range(0, len(texts), 512):
            for encoding in tokenizer.encode_batch(texts[start : start + 512]):
                parts.append(np.array([eos, *encoding.ids], np.uint16))
        yield weight, np.concatenate(parts), sum(len(t.encode()) for t in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--sample-chars", type=int, default=30_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    tokenizer = train(sample(args.work, args.sample_chars, rng), args.vocab_size)
    save(tokenizer, args.out)
    args.tokens.mkdir(parents=True, exist_ok=True)
    for weight, ids, size in streams(tokenizer, args.work, rng):
        data = lzma.compress(ids.tobytes(), preset=4)
        (args.tokens / f"weight{weight}.u16.xz").write_bytes(data)
        print(
            json.dumps(
                {
                    "weight": weight,
                    "tokens": len(ids),
                    "bytes": size,
                    "bytes_per_token": size / len(ids),
                    "xz_bytes": len(data),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
