"""Walks on the host, by the rules of `treewy.accept`: what the reference and eager implementations share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from treewy.accept import Accepted, Choice, choose_sampled, walk, walk_choices
from treewy.ops.accept.records import NO_TOKEN, AcceptedTables, DrawnLaws, Ending, RequestLaws, host_law
from treewy.packed import TreeTables
from treewy.sampling import Law, draw
from treewy.shapes import Array, Tensor
from treewy.tree import DraftTree

# From a row's logits and how a request samples to the row's law, float64; NaN if they say nothing.
LawOf = Callable[[Tensor, Law], Array]


class Numbers:
    """A coin (`accept.Coin`) that takes given numbers in order."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers, self.num_used = numbers, 0

    def flip(self, probability: float) -> bool:
        """See `accept.Coin.flip`."""
        return bool(self._next() < probability)

    def draw(self, weights: Array) -> int:
        """See `accept.Coin.draw`."""
        return draw(weights, self._next())

    def _next(self) -> float:
        self.num_used += 1
        return self.numbers[self.num_used - 1]


class Walked(NamedTuple):
    """One walk: its outcome, and how many numbers were taken after each of its rows."""

    accepted: Accepted
    taken: Sequence[int]


class Given(NamedTuple):
    """One sequence's tree, without inert rows, and the packed row of each of its rows."""

    tree: DraftTree
    rows: list[int]


def walk_all(
    tables: TreeTables, tokens: Tensor, slots: Tensor | None, out: AcceptedTables, one: Callable[[int, Given], Walked]
) -> None:
    """Walk every sequence that has rows and a slot, and write the outcomes."""
    out.path.rows.fill_(tables.num_rows)
    out.tokens.fill_(NO_TOKEN)
    for counts in (out.path.lengths, out.num_used):
        counts.zero_()
    out.endings.fill_(int(Ending.NOTHING))
    inert = [False] * tables.num_seqs if slots is None else (slots < 0).tolist()
    for seq in range(tables.num_seqs):
        given = None if inert[seq] else _tree(tables, tokens, seq)
        if given is not None:
            _write(out, seq, one(seq, given), given.rows)


def greedy_walk(choices: Tensor, given: Given) -> Walked:
    """Follow the choices at a tree's rows."""
    accepted = walk_choices(given.tree, choices[given.rows].tolist())
    return Walked(accepted, [0] * len(accepted.tokens))


def sampled(
    tables: TreeTables,
    tokens: Tensor,
    logits: Tensor,
    laws: RequestLaws,
    uniforms: Tensor,
    drawn: DrawnLaws | None,
    slots: Tensor | None,
    out: AcceptedTables,
    law_of: LawOf,
    choices_of: Callable[[Tensor], Tensor],
) -> None:
    """Walk a batch by `accept.choose_sampled`, with laws of rows on the way only."""
    live = [True] * tables.num_seqs if slots is None else (slots >= 0).tolist()
    columns = zip(*(field.tolist() for field in laws), strict=True)
    known = [host_law(*values) if is_live else None for is_live, values in zip(live, columns, strict=True)]

    def one(seq: int, given: Given) -> Walked:
        law = known[seq]
        if law is None:
            return greedy_walk(choices_of(logits), given)
        coin, taken = Numbers(uniforms[seq].tolist()), []

        def choose(row: int) -> Choice:
            packed = given.rows[row]
            target = law_of(logits[packed], law)
            if np.isnan(target).any():
                return Choice(NO_TOKEN, None)
            choice = choose_sampled(given.tree, row, target, _drawn_from(drawn, packed), coin)
            taken.append(coin.num_used)
            return choice

        return Walked(walk(given.tree, choose), taken)

    walk_all(tables, tokens, slots, out, one)


def uniforms(keys: Tensor, positions: Tensor, out: Tensor) -> None:
    """See `api.uniforms`."""
    for row, (key, position) in enumerate(zip(keys.cpu().numpy(), positions.tolist(), strict=True)):
        generator = np.random.Generator(np.random.Philox(key=key.view(np.uint64)))
        out[row] = torch.from_numpy(generator.random(position + out.shape[1])[position:])


def _drawn_from(drawn: DrawnLaws | None, row: int) -> Array | None:
    place = -1 if drawn is None else int(drawn.law_of_row[row])
    return drawn.laws[place].double().cpu().numpy() if drawn is not None and place >= 0 else None


def _tree(tables: TreeTables, tokens: Tensor, seq: int) -> Given | None:
    start, end = tables.cu_rows[seq : seq + 2].tolist()
    rows = [row for row in range(start, end) if int(tables.seq_of_row[row]) == seq]
    if not rows:
        return None
    place = {row - start: new for new, row in enumerate(rows)} | {-1: -1}
    parents = [place[int(tables.parents[row])] for row in rows]
    return Given(DraftTree(parents, tokens[rows].tolist()), rows)


def _write(out: AcceptedTables, seq: int, walked: Walked, rows: Sequence[int]) -> None:
    accepted, taken = walked
    room = out.path.rows.shape[1]
    if len(accepted.tokens) > room:
        accepted, ending = accepted.cut(room), Ending.CUT
    elif accepted.tokens[-1] == NO_TOKEN:
        accepted, ending = accepted.cut(len(accepted.tokens) - 1), Ending.NOT_FINITE
    else:
        ending = Ending.BONUS if accepted.is_bonus else Ending.RECOVERED
    length = len(accepted.tokens)
    out.path.rows[seq, :length] = torch.tensor([rows[row] for row in accepted.path], dtype=torch.int32)
    out.tokens[seq, :length] = torch.tensor(accepted.tokens, dtype=torch.int32)
    out.path.lengths[seq] = length
    out.endings[seq] = int(ending)
    out.num_used[seq] = taken[length - 1] if length else 0
