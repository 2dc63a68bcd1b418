"""Tolerances of caches, engine and checkpoint targets, each with its reason. Those of the ops are in tolerances.py."""

# The float64 toy's logits against the NumPy oracle's: a thousand float64 roundings of values around 1.
TOY_LOGITS = 1e-9

# Memory of a slot against the oracle's, at any time of a long run: recurrences contract, so nothing builds up.
TOY_MEMORY = 1e-12

# The same numbers computed in a batch of another make-up: products of other sizes may sum in another order.
TOY_NEIGHBOURS = 1e-12

# Float32 targets against stock transformers, relative to the largest logit: another order of sums in every product, and
# a chunked delta rule there. Seen on 12 tiny checkpoints: logits 4e-6, hidden states 4e-6, the head 4e-7.
HF_LOGITS = 2e-5

# Bfloat16 targets: their root-mean-square error against float32 with the same weights, over that of stock bfloat16. Both
# round a few times per layer, in other places. Seen: 0.9 to 1.3.
HF_BFLOAT16_FACTOR = 2.0
