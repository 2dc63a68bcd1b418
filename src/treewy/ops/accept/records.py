"""What acceptance on the device takes and gives."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from treewy.packed import PathTables
from treewy.sampling import Law
from treewy.shapes import Float, Int, Tensor, lasting

# Stands for a token that could not be chosen, or a place without one: no id, so it never matches a draft.
NO_TOKEN = -1


class Ending(IntEnum):
    """Why a walk ended where it did.

    `RECOVERED`: the last token is held by no draft that could follow. `BONUS`: it follows a leaf. `CUT`: the path had
    room for no more rows. `NOT_FINITE`: the logits after the next row on the way say nothing, a NaN or no finite maximum;
    path and tokens end before it. `NOTHING`: the sequence has no rows, or no slot.
    """

    RECOVERED = 0
    BONUS = 1
    CUT = 2
    NOT_FINITE = 3
    NOTHING = 4


class AcceptedTables(NamedTuple):
    """The outcome of one step for each sequence, int32 and on the device: `accept.Accepted`, of a batch.

    Attributes:
        path: Rows to commit, root first, as commit takes them. As many as tokens: the state after them lacks the last
            token, which is the next step's root.
        tokens: The accepted drafts, then one token of the target's own; `NO_TOKEN` past the path's length.
        endings: Why each walk ended, an `Ending`.
        num_used: Numbers of `uniforms` that each walk took.
        notes: Working memory of `sampled`: what each draft that fell has left of the laws. Nobody else's business.
    """

    path: PathTables
    tokens: Int[Tensor, "B P"]
    endings: Int[Tensor, "B"]
    num_used: Int[Tensor, "B"]
    notes: Float[Tensor, "B T 3"]

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Tokens of each sequence, and rows of its path."""
        return self.path.lengths


class RequestLaws(NamedTuple):
    """How each sequence samples: `sampling.Law`, of a batch, so that one captured graph serves every mix.

    Eager and reference refuse values out of range, by `host_law`. Kernels cannot, and cut them to the range: what follows
    in brackets.

    Attributes:
        temperature: Divides the logits. Where it is 0 (or below, or NaN) the sequence decodes greedily and takes no number,
            and the rest has no effect. (Infinity: all tokens alike that have a finite logit.)
        top_k: Keep the k most likely tokens; 0 (or below) keeps all.
        top_p: Keep the most likely tokens until their probability reaches this; from 1 on (or NaN) all. (From 0 down: the
            most likely one.)
        min_p: Keep tokens at least this times as likely as the most likely one; 0 (or below, or NaN) keeps all. (Above 1: as
            1, the most likely one.)
    """

    temperature: Float[Tensor, "B"]
    top_k: Int[Tensor, "B"]
    top_p: Float[Tensor, "B"]
    min_p: Float[Tensor, "B"]


class DrawnLaws(NamedTuple):
    """The laws that drafts were drawn from.

    Attributes:
        laws: One per row whose children were drawn: the law of the first of them.
        law_of_row: Which of `laws` a row's children were drawn from; -1: they were chosen.
    """

    laws: Float[Tensor, "num_laws vocab"]
    law_of_row: Int[Tensor, "N"]


def host_law(temperature: float, top_k: int, top_p: float, min_p: float) -> Law | None:
    """Return the law that one sequence's values stand for, None for greedy decoding.

    Raises:
        RequestError: a value is out of range.
    """
    if temperature == 0:
        return None
    return Law(temperature=temperature, top_k=top_k, top_p=1.0 if top_p > 1 else top_p, min_p=min_p)


@lasting
def request_laws(laws: Sequence[Law | None], device: torch.device | str = "cpu") -> RequestLaws:
    """Bring the laws of a batch of requests to the device; None decodes greedily."""
    columns = [
        (law.temperature, law.top_k, law.top_p, law.min_p) if law is not None else (0.0, 0, 1.0, 0.0) for law in laws
    ]
    numbers = torch.tensor(columns, dtype=torch.float64).reshape(-1, 4).to(device)
    temperature, top_k, top_p, min_p = (column.contiguous() for column in numbers.unbind(1))
    return RequestLaws(temperature, top_k.int(), top_p, min_p)
