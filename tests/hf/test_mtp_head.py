"""The checkpoint's head and the trees it grows, against transformers' own generic layer with the same tensors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from drafters import Recorder
from fixtures import VOCAB
from hf_steps import continuation, forward, relative_error
from mtp_oracle import MTPOracle
from tolerances import HF_LOGITS
from treewy.cache import AttentionSpec, CachePool, get_policy
from treewy.draft import Committed, Draft, Drafter, MTPDrafter, Root
from treewy.engine import Engine, SamplingParams
from treewy.errors import RequestError
from treewy.hf import HFMTPHead, HFTarget
from treewy.hf.checkpoint import load_mtp_weights
from treewy.packed import pack
from treewy.tree import DraftTree

SHAPES = [
    DraftTree.chain(3),
    DraftTree.from_widths([3, 3, 3]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
    DraftTree([-1]),
]
TEXTS = [np.random.default_rng(n).integers(0, VOCAB, 3 + 9 * n).tolist() for n in range(len(SHAPES))]


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = load_mtp_weights(checkpoint)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def head(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> HFMTPHead:
    return HFMTPHead(model, weights)


@pytest.fixture(scope="module")
def oracle(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> MTPOracle:
    return MTPOracle(model, weights)


def shown(drafter: MTPDrafter, model: PreTrainedModel, slot: int, text: Sequence[int], sizes: Sequence[int]) -> None:
    """Show the drafter `text`, whose last token is the root, in steps of the given sizes."""
    hidden, start = forward(model, text[:-1]).hidden, 0
    for size in sizes:
        drafter.observe(
            [Committed(slot, hidden[start : start + size], text[start + 1 : start + size + 1], text[start])]
        )
        start += size
    assert start == len(text) - 1


def test_a_chain_is_transformers_layer(model: PreTrainedModel, head: HFMTPHead, oracle: MTPOracle) -> None:
    """Embedding first, zero-centred norms, gate, rope and the final norm: row by row as `MtpLayer` has them."""
    text = TEXTS[3]
    hidden = forward(model, text[:-1]).hidden
    pool = CachePool(head.layer_specs(), 1, get_policy("reconstruct"), dtype=head.dtype)
    step = pool.begin(pack([DraftTree.chain(len(text) - 2)]), [pool.allocate()])
    y = head.forward(torch.tensor(text[1:]), hidden, step.positions, step)
    want = oracle.chain(text[1:], hidden)
    assert relative_error(y, want) < HF_LOGITS
    assert relative_error(head.logits(y), oracle.logits(want)) < HF_LOGITS


def test_tree_rows_are_their_root_paths(model: PreTrainedModel, head: HFMTPHead, oracle: MTPOracle) -> None:
    """Every row that the growing of a batch of trees runs gives what its root path gives when run as a chain."""
    drafter = MTPDrafter(head, len(SHAPES), poison=True)
    outputs: list[torch.Tensor] = []
    logits = head.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        outputs.append(hidden)
        return logits(hidden)

    for slot, text in enumerate(TEXTS):
        drafter.allocate(slot)
        shown(drafter, model, slot, text, [len(text) - 1])
    head.logits = spy
    try:
        trees = [
            draft.tree for draft in drafter.propose([Root(n, text[-1], SHAPES[n]) for n, text in enumerate(TEXTS)])
        ]
    finally:
        del head.logits
    assert len(outputs) == max(shape.max_depth for shape in SHAPES)
    compared = 0
    for depth, level in enumerate(outputs):
        rows = []
        for text, tree in zip(TEXTS, trees, strict=True):
            at = [row for row in range(tree.num_rows) if tree.depth[row] == depth and tree.children(row)]
            rows += list(oracle.outputs(text, forward(model, text[:-1]).hidden, tree)[at]) if at else []
        assert relative_error(level, torch.stack(rows)) < HF_LOGITS
        compared += len(rows)
    assert compared > 20


def test_trees_equal_the_naive_growth(model: PreTrainedModel, head: HFMTPHead, oracle: MTPOracle) -> None:
    """A batch of five shapes, a root alone among them: the tokens are the oracle's top-k, path by path."""
    drafter = MTPDrafter(head, len(SHAPES), poison=True)
    for slot, text in enumerate(TEXTS):
        drafter.allocate(slot)
        shown(drafter, model, slot, text, [len(text) - 1])
    trees = [draft.tree for draft in drafter.propose([Root(n, text[-1], SHAPES[n]) for n, text in enumerate(TEXTS)])]
    for text, shape, tree in zip(TEXTS, SHAPES, trees, strict=True):
        want = oracle.propose(text, forward(model, text[:-1]).hidden, shape)
        assert (tree.parents, tree.tokens) == (want.parents, want.tokens)


def test_any_history_gives_the_same_drafts(model: PreTrainedModel, head: HFMTPHead) -> None:
    """Fault L07: rows drafted before and dropped leave nothing; the drafter holds one row per committed row."""
    text = TEXTS[3]
    wanted = None
    for sizes in ([29], [1] * 29, [4, 1, 5, 2, 2, 4, 3, 8]):
        drafter = MTPDrafter(head, 2)
        drafter.allocate(1)
        hidden, start = forward(model, text[:-1]).hidden, 0
        for number, size in enumerate(sizes):
            drafter.observe(
                [Committed(1, hidden[start : start + size], text[start + 1 : start + size + 1], text[start])]
            )
            start += size
            drafter.propose([Root(1, text[start], SHAPES[number % len(SHAPES)])])
            assert drafter.cache.length(drafter._slot_of[1]) == start
        tree = drafter.propose([Root(1, text[-1], SHAPES[1])])[0].tree
        wanted = wanted or tree.tokens
        assert tree.tokens == wanted


class Pauses(Drafter):
    """Drafts nothing in some steps, whatever it is asked."""

    def __init__(self, inner: Drafter, drafts: Sequence[bool]) -> None:
        self.inner, self.drafts, self.step = inner, drafts, 0

    def allocate(self, slot: int) -> None:
        self.inner.allocate(slot)

    def free(self, slot: int) -> None:
        self.inner.free(slot)

    def observe(self, committed: Sequence[Committed]) -> None:
        self.inner.observe(committed)

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        self.step += 1
        if not self.drafts[(self.step - 1) % len(self.drafts)]:
            roots = [root._replace(shape=DraftTree([-1])) for root in roots]
        return self.inner.propose(roots)


def test_drafts_after_a_pause(text_model: PreTrainedModel, text_checkpoint: Path) -> None:
    """Fault D09: steps that draft nothing still feed the drafter; where it drafts again, it drafts as if it never stopped."""
    prompt, text = [5, 80, 33], continuation(text_model, [5, 80, 33], 40)

    def drafts(schedule: Sequence[bool]) -> dict[tuple[int, ...], tuple[int, ...]]:
        drafter = MTPDrafter(HFMTPHead(text_model, load_mtp_weights(text_checkpoint)), 1)
        recorder = Recorder(Pauses(drafter, schedule))
        engine = Engine(HFTarget(text_model), recorder, shape=DraftTree.from_widths([2, 2]))
        lengths, begin = [], engine.cache.begin

        def spy(tree, slots, policy=None):
            lengths.append(engine.cache.length(0))
            return begin(tree, slots, policy)

        engine.cache.begin = spy
        result = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
        assert result.prompt_ids + result.token_ids == text
        trees = [trees[0] for trees in recorder.trees]
        return {n: tree.tokens for n, tree in zip(lengths[1:], trees, strict=True) if tree.num_drafts}

    steady, paused = drafts([True]), drafts([True, False, False, True])
    common = sorted(steady.keys() & paused.keys())
    assert len(common) > 10
    # The last steps are cut to what is left, so one may be the beginning of the other.
    assert all(steady[n] == paused[n] for n in common)


def test_the_head_owns_mtp_tensors_only(model: PreTrainedModel, head: HFMTPHead, weights: dict) -> None:
    """The embedding, the rotary tables and the LM head are the target's."""
    assert {f"mtp.{name}" for name in head.module.state_dict()} == set(weights)
    assert head.text.embed_tokens.weight is model.model.embed_tokens.weight
    assert head.lm_head is model.lm_head
    assert not {id(p) for p in head.module.parameters()} & {id(p) for p in model.parameters()}
    assert not any(p.requires_grad for p in head.module.parameters())
    for name, tensor in weights.items():
        assert torch.equal(head.module.state_dict()[name.removeprefix("mtp.")], tensor)
    assert head.layer_specs() == [AttentionSpec(2, 16)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.update({"mtp.fc.weight": torch.zeros(64, 64)}),
            r"mtp.fc.weight should be \(64, 128\) and is \(64, 64\)",
        ),
        (lambda w: w.pop("mtp.norm.weight"), r"mtp.norm.weight should be \(64,\) and is absent"),
        (lambda w: w.update({"mtp.extra": torch.zeros(1)}), r"mtp.extra should be absent and is \(1,\)"),
        (lambda w: w.update({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}), r"mtp.layers.1.* and is absent"),
        (lambda w: w.pop("mtp.fc.weight"), "must hold mtp.fc.weight"),
        (lambda w: [w.pop(name) for name in list(w) if "layers" in name], r"mtp.layers.\*; got 4"),
    ],
)
def test_a_head_that_does_not_fit(model: PreTrainedModel, weights: dict, change, message: str) -> None:
    """Missing, surplus and misshapen tensors are named."""
    changed = dict(weights)
    change(changed)
    with pytest.raises(RequestError, match=message):
        HFMTPHead(model, changed)
