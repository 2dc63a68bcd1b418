"""Reported faults of ends in mid-block: counts, memory and the next turn."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drafters import ScriptedDrafter
from textkit import ByteTokenizer, ScriptTarget
from toy_steps import committed_lengths
from treewy.cache import Batch, CachePool
from treewy.draft import Draft, NoDrafter, Root
from treewy.engine import Engine, SamplingParams, TokenKind
from treewy.model import Verified
from treewy.tree import DraftTree

TEXT = b"think hard, then answer"
SCRIPT = [1, 2, *TEXT]
CHAIN = DraftTree.chain(4)


@pytest.mark.parametrize("stop", ["h", "nk", "nk h", "ard", ", t", "answe"])
@pytest.mark.parametrize("shape", [CHAIN, DraftTree.from_widths([2, 1, 1, 1, 1, 1, 1])])
def test_everything_ends_with_the_stop_string(stop: str, shape: DraftTree) -> None:
    """Faults I04 and I07: tokens, kinds, log-probabilities, gaps, counts and memory, none of them past the others."""
    drafter = ScriptedDrafter([SCRIPT], right=1.0, vocab_size=256)
    engine = Engine(ScriptTarget(SCRIPT), drafter, shape=shape, tokenizer=ByteTokenizer())
    lengths = committed_lengths(engine)
    params = SamplingParams(stop=[stop], logprobs=2, record_gaps=True)
    result = engine.generate([SCRIPT[:2]], params)[0]
    end = TEXT.index(stop.encode()) + len(stop)
    assert (result.finish_reason, result.text) == ("stop", TEXT[: end - len(stop)].decode())
    assert result.token_ids == list(TEXT[:end])
    assert len(result.kinds) == len(result.logprobs) == len(result.top2_gaps) == end
    assert lengths[-1] == 2 + end - 1
    assert sum(size * count for size, count in result.accept_hist.items()) == end - 1
    accepted = result.kinds.count(TokenKind.ACCEPTED)
    assert accepted <= min(result.num_drafted, end)
    assert sum(result.accept_hist.values()) == result.num_verify_steps
    assert max(result.accept_rate_by_depth.values(), default=1.0) <= 1.0


def test_the_turn_after_a_stop_in_mid_block() -> None:
    """Fault I17: tokens thrown away after a stop leave nothing behind: the next turn is that of decoding without drafts."""
    tokenizer, params = ByteTokenizer([b"a", b"b", b"c"]), SamplingParams(temperature=1.0, seed=21, max_new_tokens=24)

    def fresh(drafter: NoDrafter) -> Engine:
        return Engine(Dice(), drafter, shape=CHAIN, tokenizer=tokenizer, max_num_seqs=1)

    whole = fresh(NoDrafter()).generate([[0]], params)[0]
    num_cut = 0
    for place in range(4, 12):
        stopping = replace(params, stop=[whole.text[place - 3 : place + 1]])
        engine = fresh(Zeros())
        lengths = committed_lengths(engine)
        first = engine.generate([[0]], stopping)[0]
        assert first.token_ids == whole.token_ids[: len(first.token_ids)]
        assert lengths[-1] == len(first.token_ids)
        follow = [0, *first.token_ids, 1]
        assert (
            engine.generate([follow], params)[0].token_ids == fresh(NoDrafter()).generate([follow], params)[0].token_ids
        )
        num_cut += first.kinds[-1] is TokenKind.ACCEPTED
    assert num_cut > 1, "no stop fell into the middle of a block"


class Dice(ScriptTarget):
    """Says 0, 1 and 2 with the shares .5, .3 and .2, whatever came before."""

    def __init__(self) -> None:
        super().__init__([], vocab_size=3)

    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        verified = super().verify(batch, cache)
        return verified._replace(logits=torch.tensor([0.5, 0.3, 0.2]).log().expand(len(verified.logits), -1).clone())


class Zeros(NoDrafter):
    """Drafts token 0 in every row."""

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        return [Draft(root.shape.with_tokens([root.token] + [0] * root.shape.num_drafts)) for root in roots]
