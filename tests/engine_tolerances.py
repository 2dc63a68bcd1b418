"""Tolerances of caches, engine and checkpoint targets, each with its reason. Those of the ops are in tolerances.py."""

# The float64 toy's logits against the NumPy oracle's: a thousand float64 roundings of values around 1.
TOY_LOGITS = 1e-9

# Memory of a slot against the oracle's, at any time of a long run: recurrences contract, so nothing builds up.
TOY_MEMORY = 1e-12

# The same numbers computed in a batch of another make-up: products of other sizes may sum in another order.
TOY_NEIGHBOURS = 1e-12

# Float32 targets against stock transformers, relative to the largest logit: another order of sums in every product, and
# a chunked delta rule there. Seen: 2e-6 on the tiny checkpoints.
HF_LOGITS = 1e-4
