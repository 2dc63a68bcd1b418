"""Stock transformers decoding, timed: the outside judge of the engine's tokens."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from treewy.shapes import Tensor


class Stock(NamedTuple):
    """Generated tokens, and tokens after the first over the time since the first."""

    token_ids: list[int]
    tokens_per_s: float


class _Clock(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note one token; the first call brings the prompt."""
        del value
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def stock_generate(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> Stock:
    """Decode greedily with `model.generate`, another code path than the engine's.

    Args:
        model: A causal language model.
        prompt: Token ids.
        max_new_tokens: Most tokens to generate.
        eos_ids: Tokens that end the text; none by default, whatever the model's own generation config says.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    eos = list(eos_ids)
    clock = _Clock()
    generate: Any = model.generate
    # As arguments, not in a GenerationConfig: there None would give way to the model's own end tokens.
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        streamer=clock,
    )
    times = clock.times[1:]
    decode_s = times[-1] - times[0] if len(times) > 1 else 0.0
    return Stock(output[0, len(prompt) :].tolist(), (len(times) - 1) / decode_s if decode_s else 0.0)
