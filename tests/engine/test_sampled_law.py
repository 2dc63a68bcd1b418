"""Sampled decoding on the toy: the law of 20,000 continuations, drafted in every way, against the toy's own law.

The toy's vocabulary is small enough to run every text through it, so what is sampled is held against exact
probabilities. Faults planted in the rule, the drafts and the streams must show at the same size.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import jaxtyping
import numpy as np
import pytest
import torch

from toy_head import HIDDEN, ToyHead
from toy_steps import make_pool, start, verify
from treewy import Engine, SamplingParams
from treewy.accept import Accepted, Choice, sampled, walk
from treewy.draft import MTPDrafter, NoDrafter
from treewy.draft.mtp import MTPHead
from treewy.draft.shape import cut_to_depth
from treewy.model import ToyTarget
from treewy.model.toy import ToyConfig
from treewy.sampling import ACCEPT, DRAFT, Law, Stream, draw_without_replacement
from treewy.tree import DraftTree

VOCAB, LENGTH, NUM = 6, 3, 20_000
LAW = Law(top_k=4)
PROMPT = [1, 4, 2, 0]
CHAIN, TREE = DraftTree.chain(3), DraftTree.from_widths([2, 2])
P_VALUE = 1e-3
CONFIG = ToyConfig(
    layers="dd", vocab_size=VOCAB, hidden=HIDDEN, num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3
)

TEXTS = [text for length in range(LENGTH + 1) for text in product(range(VOCAB), repeat=length)]
NUMBER = {text: number for number, text in enumerate(TEXTS)}
# Text number and token to the number of the longer text; texts of full length have none.
LONGER = np.array([[NUMBER.get((*text, token), -1) for token in range(VOCAB)] for text in TEXTS])


@pytest.fixture(autouse=True)
def _unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Checking them is five sixths of the time here, and the tests next door check the same calls.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Tables(NamedTuple):
    """Logits after every text of up to LENGTH tokens: the toy's, and those of a drafter that half knows the toy."""

    target: torch.Tensor
    drafter: torch.Tensor


@cache
def tables() -> Tables:
    """Run all texts through two toys, each as one tree below the prompt."""
    parents = [-1] + [NUMBER[text[:-1]] for text in TEXTS[1:]]
    tree = DraftTree(parents, [PROMPT[-1]] + [text[-1] for text in TEXTS[1:]])
    logits = []
    for seed in (3, 4):
        toy = ToyTarget(CONFIG, seed=seed)
        pool = make_pool(toy)
        logits.append(verify(toy, pool, [tree], [start(toy, pool, PROMPT[:-1])]).logits)
    return Tables(logits[0], 0.5 * logits[0] + 0.7 * logits[1])


@cache
def exact_law() -> np.ndarray:
    """Return the probability of every continuation, by the numbers of TEXTS that have full length."""
    law = LAW.probabilities(tables().target).numpy()
    chances = np.ones(len(TEXTS))
    for number, text in enumerate(TEXTS[1:], start=1):
        before = NUMBER[text[:-1]]
        chances[number] = chances[before] * law[before, text[-1]]
    return chances[-(VOCAB**LENGTH) :]


class Fault(NamedTuple):
    """What to do wrong; nothing by default."""

    keeps_siblings: bool = False
    forgets_rejections: bool = False
    says_softmax: bool = False
    one_stream: bool = False


NO_FAULT = Fault()


class Drafts(NamedTuple):
    """How all sequences draft."""

    shape: DraftTree
    drawn: bool


NOTHING = Drafts(DraftTree([-1]), False)


@cache
def continuations(drafts: Drafts, fault: Fault = NO_FAULT, num: int = NUM) -> list[int]:
    """Decode LENGTH tokens `num` times, each sequence with its own two streams; return the numbers of the texts."""
    target, drafter = (LAW.probabilities(logits) for logits in tables())
    rows, drafted_from = list(target.numpy()), list(drafter.numpy())
    coins = [Stream(seed, DRAFT if fault.one_stream else ACCEPT) for seed in range(num)]
    draws = [Stream(seed, DRAFT) for seed in range(num)]
    rule = faulty_rule(fault) if fault.keeps_siblings or fault.forgets_rejections else sampled
    text, going = np.zeros(num, dtype=int), np.arange(num)
    while len(going):
        for length in range(LENGTH):
            batch = going[np.array([len(TEXTS[number]) == length for number in text[going]], dtype=bool)]
            if not len(batch):
                continue
            # As in an engine, what cannot be delivered any more is not drafted.
            shape = cut_to_depth(drafts.shape, LENGTH - length)
            tokens, nodes = propose(shape, text[batch], drafter, [draws[i] for i in batch] if drafts.drawn else None)
            parents = sorted(set(shape.parents[1:])) if drafts.drawn or fault.says_softmax else []
            tokens, nodes = tokens.tolist(), nodes.tolist()
            for place, seq in enumerate(batch.tolist()):
                tree = shape.with_tokens(tokens[place])
                laws = {row: drafted_from[nodes[place][row]] for row in parents}
                accepted = rule(tree, [rows[node] for node in nodes[place]], laws, coins[seq])
                for token in accepted.tokens[: LENGTH - length]:
                    text[seq] = LONGER[text[seq], token]
        going = going[text[going] < NUMBER[(0,) * LENGTH]]
    return text.tolist()


def propose(
    shape: DraftTree, texts: np.ndarray, laws: torch.Tensor, streams: Sequence[Stream] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the text numbers of all rows of all sequences; drawn with `streams`, or the most likely."""
    tokens = np.zeros((len(texts), shape.num_rows), dtype=int)
    nodes = np.zeros_like(tokens)
    nodes[:, 0] = texts
    for row in range(shape.num_rows):
        children = list(shape.children(row))
        if not children:
            continue
        law = laws[nodes[:, row]]
        if streams is None:
            best = law.topk(len(children), dim=-1).indices
        else:
            uniforms = np.stack([stream.uniform(len(children)) for stream in streams])
            best = draw_without_replacement(law, torch.from_numpy(uniforms))
        tokens[:, children] = best.numpy()
        nodes[:, children] = LONGER[nodes[:, [row]], tokens[:, children]]
    return tokens, nodes


def faulty_rule(fault: Fault) -> Callable[..., Accepted]:
    """Return the rule for drawn children with a fault."""

    def choose(tree: DraftTree, row: int, target: np.ndarray, law: np.ndarray, coin: Stream) -> Choice:
        whole = target
        for child in tree.children(row):
            token = tree.tokens[child]
            if coin.flip(target[token] / law[token]):
                return Choice(token, child)
            target = np.maximum(target - law, 0)
            target = target / target.sum()
            if not fault.keeps_siblings:
                law = np.where(np.arange(VOCAB) == token, 0, law)
                law = law / law.sum()
        return Choice(coin.draw(whole if fault.forgets_rejections else target), None)

    return lambda tree, target, laws, coin: walk(tree, lambda row: choose(tree, row, target[row], laws.get(row), coin))


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Return Pearson's chi-square test of counts against a law; rare outcomes are thrown together."""
    expected = law * counts.sum()
    assert not counts[expected == 0].any(), "something impossible was sampled"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_of(texts: list[int]) -> float:
    law = exact_law()
    return p_value(np.bincount(np.array(texts) - (len(TEXTS) - len(law)), minlength=len(law)), law)


def test_the_test_itself() -> None:
    """Its numbers: a known chi-square, a toy whose law is not flat, and a drafter that is neither right nor hopeless."""
    assert p_value(np.array([44, 56]), np.array([0.5, 0.5])) == pytest.approx(0.23013934, abs=1e-7)
    law = exact_law()
    assert law.sum() == pytest.approx(1)
    assert np.count_nonzero(law) == 4**LENGTH
    target, drafter = (LAW.probabilities(logits).numpy() for logits in tables())
    overlap = np.minimum(target, drafter).sum(-1)[: VOCAB + 1]
    assert 0.3 < overlap.mean() < 0.9


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param(NOTHING, id="none"),
        pytest.param(Drafts(CHAIN, True), id="chain-sampled"),
        pytest.param(Drafts(TREE, True), id="tree-sampled"),
    ],
)
def test_20000_continuations(drafts: Drafts) -> None:
    """Faults H01 and H08: whatever was drafted, the tokens follow the toy's law."""
    assert p_of(continuations(drafts)) > P_VALUE


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain-argmax", "tree-argmax"])
def test_20000_continuations_of_argmax_drafts(shape: DraftTree) -> None:
    """Not just their law: with the same seeds, the tokens of sampling without drafts."""
    assert continuations(Drafts(shape, False)) == continuations(NOTHING)


@pytest.mark.parametrize(
    ("fault", "drafts"),
    [
        pytest.param(Fault(keeps_siblings=True), Drafts(TREE, True), id="siblings-not-renormalised"),
        pytest.param(Fault(forgets_rejections=True), Drafts(CHAIN, True), id="bonus-from-unreduced-law"),
        pytest.param(Fault(says_softmax=True), Drafts(TREE, False), id="softmax-of-an-argmax-draft"),
        pytest.param(Fault(one_stream=True), Drafts(CHAIN, True), id="one-stream-for-both"),
    ],
)
def test_faults_show_at_the_same_size(fault: Fault, drafts: Drafts) -> None:
    """Faults H02, H05 and H08."""
    assert p_of(continuations(drafts, fault)) < P_VALUE
