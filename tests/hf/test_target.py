"""The target over a checkpoint, against the checkpoint's own full forward and its own `generate`. Float32."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from drafters import ScriptedDrafter
from fixtures import VOCAB
from hf_steps import continuation, forward, relative_error, stock_reference
from tolerances import HF_LOGITS
from toy_steps import feed, make_pool, start, storages, verify
from treewy.cache import POLICIES
from treewy.engine import Engine, SamplingParams
from treewy.engine.lossless import compare_decoders
from treewy.hf import HFTarget
from treewy.tree import DraftTree

PROMPTS = [[3], [90, 4], [7, 7, 7, 7], list(range(20, 61))]
SHAPES = [
    DraftTree.chain(3),
    DraftTree.from_widths([3, 3, 3]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
]


def tokens(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size).tolist()


@pytest.mark.parametrize("commit", POLICIES)
def test_every_root_path_is_a_plain_forward(model: PreTrainedModel, commit: str) -> None:
    """A batch of four trees: each row's logits and hidden state are those of prefix + path run whole by transformers.

    Faults A04, G01 and L02: positions by depth, the attention layer after three gated-delta layers, several rows at once
    over committed memory.
    """
    target = HFTarget(model)
    pool = make_pool(target, commit)
    slots = [start(target, pool, prompt) for prompt in PROMPTS]
    trees = [shape.with_tokens(tokens(shape.num_rows, seed)) for seed, shape in enumerate(SHAPES)]
    before = storages(pool)
    batch = verify(target, pool, trees, slots)
    assert storages(pool) == before
    for seq, (prompt, tree) in enumerate(zip(PROMPTS, trees, strict=True)):
        for row in range(tree.num_rows):
            at = batch.pending.tree.starts[seq] + row
            want = forward(model, prompt + [tree.tokens[node] for node in tree.path(row)])
            assert relative_error(batch.logits[at], want.logits[-1]) < HF_LOGITS
            assert relative_error(batch.hidden[at], want.hidden[-1]) < HF_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
def test_after_a_commit(text_model: PreTrainedModel, commit: str) -> None:
    """Fault L01: what follows an accepted path is what follows the same tokens run whole, for every path of a tree."""
    target, tree = HFTarget(text_model), SHAPES[3].with_tokens(tokens(9))
    follow = tokens(5, seed=1)
    for node in range(tree.num_rows):
        pool = make_pool(target, commit)
        slot = start(target, pool, PROMPTS[3])
        pool.commit(verify(target, pool, [tree], [slot]).pending, [tree.path(node)])
        path = [tree.tokens[row] for row in tree.path(node)]
        want = forward(text_model, PROMPTS[3] + path + follow).logits[-5:]
        assert relative_error(feed(target, pool, slot, follow), want) < HF_LOGITS


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 70])
def test_chunked_prefill(text_model: PreTrainedModel, chunk: int, length: int) -> None:
    """Faults B06, D01 and L02: prompts around the conv window's width, in chunks of any size, one row at a time included."""
    target, prompt = HFTarget(text_model), tokens(length)
    pool = make_pool(target, poison=True)
    slot = pool.allocate()
    parts = [feed(target, pool, slot, prompt[at : at + chunk]) for at in range(0, length, chunk)]
    assert relative_error(torch.cat(parts), forward(text_model, prompt).logits) < HF_LOGITS


def make_engine(model: PreTrainedModel, commit: str, scripts: Sequence[Sequence[int]], **options) -> Engine:
    drafter = ScriptedDrafter(scripts, skip=0.1, cut=0.2, vocab_size=VOCAB)
    return Engine(HFTarget(model), drafter, shape=SHAPES[0], commit=commit, poison=True, **options)


@pytest.mark.parametrize("commit", POLICIES)
def test_engine_equals_generate(model: PreTrainedModel, commit: str) -> None:
    """Rung 6 against stock `generate`, another code path: drafts right and wrong, four shapes in one batch.

    A difference is admitted at a near-tie only.
    """
    scripts = [continuation(model, prompt, 48) for prompt in PROMPTS]
    engine = make_engine(model, commit, scripts)
    params = [SamplingParams(max_new_tokens=48, shape=shape, ignore_eos=True) for shape in SHAPES]
    results = engine.generate(PROMPTS, params)
    for prompt, result, script, one in zip(PROMPTS, results, scripts, params, strict=True):
        if result.prompt_ids + result.token_ids == script:
            continue

        def drafted(context: list[int], num_tokens: int, shape=one.shape) -> list[int]:
            again = SamplingParams(max_new_tokens=num_tokens, shape=shape, ignore_eos=True)
            return make_engine(model, commit, scripts).generate([context], again)[0].token_ids

        verdict = compare_decoders(prompt, 48, stock_reference(model), drafted)
        assert verdict.is_lossless, verdict.differences
    assert min(result.mean_accept_len for result in results) > 1.5
    assert min(result.not_first_sibling_share for result in results[1:]) > 0.3


@pytest.mark.parametrize("commit", POLICIES)
def test_state_bytes(text_model: PreTrainedModel, commit: str) -> None:
    """Under store_all the committed state and a state per row, to the byte; records are far smaller."""
    scripts = [continuation(text_model, prompt, 24) for prompt in PROMPTS]
    params = [SamplingParams(max_new_tokens=24, shape=shape, ignore_eos=True) for shape in SHAPES]
    state = 3 * 4 * 16 * 16 * 4
    record = 3 * (4 * 16 + 2 * 16 + 2 * 4) * 4
    kept = state + (16 * record + 3 * 8 if commit == "ring" else 0)
    for result, shape in zip(make_engine(text_model, commit, scripts).generate(PROMPTS, params), SHAPES, strict=True):
        assert result.state_bytes == kept + shape.num_rows * (state if commit == "store_all" else record)


def test_no_cache_of_transformers_is_used(text_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault L01: its crop leaves recurrent states behind; nothing here builds such a cache, let alone crops one."""

    def refuse(*args, **kwargs):
        raise AssertionError("a transformers cache was built")

    scripts = [continuation(text_model, prompt, 16) for prompt in PROMPTS]
    monkeypatch.setattr(Cache, "__init__", refuse)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, shape=SHAPES[1])
    results = make_engine(text_model, "reconstruct", scripts).generate(PROMPTS, params)
    assert [result.prompt_ids + result.token_ids for result in results] == scripts


def test_the_target_is_the_model(text_model: PreTrainedModel) -> None:
    """No second copy of any weight: the target holds the model, and nothing beside it has parameters."""
    target = HFTarget(text_model)
    assert target.model is text_model
    own = {id(p) for p in text_model.parameters()}
    held = [x for x in vars(target).values() if isinstance(x, torch.nn.Module)]
    assert {id(p) for module in held for p in module.parameters()} <= own
    assert not any(isinstance(x, torch.Tensor) for x in vars(target).values())


@pytest.mark.parametrize(
    ("asked", "given"), [("bfloat16", torch.bfloat16), (torch.bfloat16, torch.bfloat16), (None, torch.float32)]
)
def test_states_keep_the_dtype_the_config_asks_for(asked: object, given: torch.dtype) -> None:
    """Fault F11: the default follows the model file."""
    from types import SimpleNamespace

    from treewy.hf.target import state_dtype

    assert state_dtype(SimpleNamespace(mamba_ssm_dtype=asked)) == given


def test_requests_join_while_others_run(text_model: PreTrainedModel) -> None:
    """Fault L03: continuous batching of linear-attention layers: each request joins a step later and decodes its own."""
    scripts = [continuation(text_model, prompt, 16) for prompt in PROMPTS]
    engine = make_engine(text_model, "reconstruct", scripts, max_num_seqs=4)
    with engine.open() as session:
        numbers, most = [], 0
        for prompt in PROMPTS:
            numbers.append(session.add(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True)))
            session.step()
            most = max(most, 4 - engine.cache.num_free)
        while not session.is_idle:
            session.step()
        results = [session.result(number) for number in numbers]
    assert most > 1, "no two ran at once"
    assert [result.prompt_ids + result.token_ids for result in results] == scripts
