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

# One longer, for the engine, whose first token comes from prefill.
TEXTS = [text for length in range(LENGTH + 2) for text in product(range(VOCAB), repeat=length)]
NUMBER = {text: number for number, text in enumerate(TEXTS)}
# Text number and token to the number of the longer text; the longest texts have none.
LONGER = np.array([[NUMBER.get((*text, token), -1) for token in range(VOCAB)] for text in TEXTS])


@pytest.fixture(autouse=True)
def _unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Checking them is five sixths of the time here, and the tests next door check the same calls.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Tables(NamedTuple):
    """Logits after every text: the toy's, and those of a drafter that half knows the toy."""

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
def exact_law(length: int) -> np.ndarray:
    """Return the probability of every text of this length, in the order of TEXTS."""
    law = LAW.probabilities(tables().target).numpy()
    chances = np.ones(len(TEXTS))
    for number, text in enumerate(TEXTS[1:], start=1):
        before = NUMBER[text[:-1]]
        chances[number] = chances[before] * law[before, text[-1]]
    first = NUMBER[(0,) * length]
    return chances[first : first + VOCAB**length]


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


def p_of(texts: list[int], length: int = LENGTH) -> float:
    """Return the p-value of the numbers of texts of one length."""
    law = exact_law(length)
    return p_value(np.bincount(np.array(texts) - NUMBER[(0,) * length], minlength=len(law)), law)


def test_the_test_itself() -> None:
    """Its numbers: a known chi-square, a toy whose law is not flat, and a drafter that is neither right nor hopeless."""
    assert p_value(np.array([44, 56]), np.array([0.5, 0.5])) == pytest.approx(0.23013934, abs=1e-7)
    for length in (LENGTH, LENGTH + 1):
        assert exact_law(length).sum() == pytest.approx(1)
        assert np.count_nonzero(exact_law(length)) == 4**length
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
    """Fault H01: whatever was drafted, the tokens follow the toy's law."""
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
    """Each by far: the largest p-value of the four is below 1e-20."""
    assert p_of(continuations(drafts, fault)) < P_VALUE


# The same through the engine.


class PlainHead(MTPHead):
    """A head without attention, to be quick: a row's drafts depend on its token and its parent's row."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (VOCAB, HIDDEN), (2 * HIDDEN, HIDDEN), (VOCAB, HIDDEN)
        self.embedding, self.mix, self.head = (
            torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes
        )

    def layer_specs(self) -> list:
        return []

    def forward(self, tokens, hidden, positions, step) -> torch.Tensor:
        return torch.tanh(torch.cat([self.embedding[tokens], hidden], dim=-1) @ self.mix / HIDDEN**0.5)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_2000_continuations_of_an_engine(shape: DraftTree) -> None:
    """From prefill on, in batches of 500: four tokens, of which the last three can be drafted."""
    engine = Engine(ToyTarget(CONFIG, seed=3), MTPDrafter(PlainHead(), 500), shape=shape, max_num_seqs=500)
    # One token more than is looked at, so that the first draft of each is not cut.
    params = [SamplingParams(max_new_tokens=5, temperature=1.0, top_k=4, seed=seed) for seed in range(2000)]
    results = engine.generate([PROMPT] * len(params), params)
    accepted = sum(len(result.token_ids) - 1 - result.num_verify_steps for result in results)
    assert accepted > 600, "hardly any draft stood: the test shows little"
    assert p_of([NUMBER[tuple(result.token_ids[:4])] for result in results], 4) > P_VALUE


TOY = ToyTarget(ToyConfig(layers="da", hidden=HIDDEN), seed=5)
SHAPES = [CHAIN, TREE, DraftTree([-1, 0, 0, 0, 3, 3, 4]), DraftTree([-1]), DraftTree.from_widths([3, 1, 1])]


def toy_engine(*, drafts: bool = True, max_num_seqs: int = 8) -> Engine:
    drafter = MTPDrafter(ToyHead(seed=1), max_num_seqs, poison=True) if drafts else NoDrafter()
    return Engine(TOY, drafter, shape=CHAIN, max_num_seqs=max_num_seqs, poison=True)


def mixed_requests(num: int, **options) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of all temperatures, laws, shapes and ways to draft; some of them greedy."""
    prompts = [[3 + n % 5, *range(n % 4)] for n in range(num)]
    laws = [{"temperature": 0.0}, {"top_k": 4}, {"temperature": 0.4}, {"temperature": 1.8, "top_p": 0.9, "min_p": 0.01}]
    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "seed": n // 2,
                "shape": SHAPES[n % 5],
                "drafts": ("sampled", "argmax")[n % 3 == 0],
                "max_new_tokens": 10 + n % 3,
                **laws[n % 4],
                **options,
            }
        )
        for n in range(num)
    ]
    return prompts, params


def test_a_request_gets_the_same_tokens_alone_and_in_any_batch() -> None:
    """Of mixed temperatures, seeds, shapes and ways to draft, in two orders, and through fewer slots."""
    prompts, params = mixed_requests(15)
    together = [result.token_ids for result in toy_engine(max_num_seqs=15).generate(prompts, params)]
    backwards = toy_engine(max_num_seqs=15).generate(prompts[::-1], params[::-1])[::-1]
    queued = toy_engine(max_num_seqs=3).generate(prompts, params)
    assert [result.token_ids for result in backwards] == together
    assert [result.token_ids for result in queued] == together
    for prompt, one, tokens in zip(prompts, params, together, strict=True):
        assert toy_engine().generate([prompt], one)[0].token_ids == tokens


def test_seeds() -> None:
    """Fault H10: a seed decides; another seed, and no seed, decide otherwise; at temperature 0 there is nothing to decide."""

    def texts(*seeds: int | None, temperature: float = 1.0) -> list[list[int]]:
        params = [SamplingParams(max_new_tokens=16, temperature=temperature, seed=seed) for seed in seeds]
        return [result.token_ids for result in toy_engine().generate([[5, 6]] * len(seeds), params)]

    first, second, again, fresh, fresher = texts(1, 2, 1, None, None)
    assert first == again == texts(1)[0]
    assert len({tuple(text) for text in (first, second, fresh, fresher)}) == 4
    assert len({tuple(text) for text in texts(1, 2, None, temperature=0.0)}) == 1


def test_argmax_drafts_change_no_token_of_a_seed() -> None:
    """Fault H15: in an engine too, at every law, tokens are those of sampling without drafts."""
    prompts, params = mixed_requests(30, drafts="argmax")
    drafted = toy_engine().generate(prompts, params)
    plain = toy_engine(drafts=False).generate(prompts, params)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    accepted = sum(len(result.token_ids) - 1 - result.num_verify_steps for result in drafted if result.num_drafted)
    assert accepted > 5, "hardly any draft stood: the test shows little"
