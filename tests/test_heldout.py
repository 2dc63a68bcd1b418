"""Losslessness of the shipped checkpoint on every held-out prompt: rung 6 of the ladder, in float32."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from tolerances import HF_LOGITS
from treewy.cache import POLICIES
from treewy.engine import Engine, Generation, SamplingParams
from treewy.engine.lossless import Reference, Verdict, compare_decoders
from treewy.hf.checkpoint import SHIPPED, load_model, load_tokenizer
from treewy.hf.load import build_engine
from treewy.hf.stock import stock_generate
from treewy.tree import DraftTree

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts" / "heldout.jsonl"
NUM_TOKENS = 200
SHAPES = {"chain": DraftTree.chain(3), "tree": DraftTree.from_widths([3, 3, 3])}
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, record_gaps=True)


@cache
def model():
    return load_model(SHIPPED, torch.float32, "cpu")


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = load_tokenizer(SHIPPED)
    return tuple(tuple(tokenizer.encode(json.loads(line)["text"])) for line in PROMPTS.read_text().splitlines())


@cache
def engine(draft: str, shape: str, commit: str) -> Engine:
    return build_engine(
        model(), draft=draft, folder=SHIPPED, shape=SHAPES.get(shape), commit=commit, max_num_seqs=len(prompts())
    )


@cache
def decoded(draft: str, shape: str, commit: str) -> list[Generation]:
    return engine(draft, shape, commit).generate([list(prompt) for prompt in prompts()], PARAMS)


def verdict_of(first: list[list[int]], again) -> Verdict:
    """Judge decoded tokens against the undrafted ones; `again` decodes on after a difference."""
    undrafted = decoded("none", "", "reconstruct")
    verdict = Verdict([], 0)
    for prompt, expected, got in zip(prompts(), undrafted, first, strict=True):

        def reference(context: list[int], n: int, prompt=prompt, expected=expected) -> Reference:
            if tuple(context) == prompt:
                return Reference(expected.token_ids, expected.top2_gaps)
            params = SamplingParams(max_new_tokens=n, ignore_eos=True, record_gaps=True)
            generation = engine("none", "", "reconstruct").generate([context], params)[0]
            return Reference(generation.token_ids, generation.top2_gaps)

        def other(context: list[int], n: int, prompt=prompt, got=got) -> list[int]:
            return got if tuple(context) == prompt else again(context, n)

        verdict += compare_decoders(prompt, NUM_TOKENS, reference, other)
    print(f"{len(verdict.differences)} differences in {verdict.num_tokens} tokens: {verdict.differences}")
    return verdict


def test_there_are_ten_prompts_of_each_kind() -> None:
    kinds = [json.loads(line)["kind"] for line in PROMPTS.read_text().splitlines()]
    assert sorted(kinds) == ["code"] * 10 + ["prose"] * 10


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafted_tokens_are_those_without_drafts(shape: str, commit: str) -> None:
    def again(context: list[int], n: int) -> list[int]:
        params = SamplingParams(max_new_tokens=n, ignore_eos=True)
        return engine("mtp", shape, commit).generate([context], params)[0].token_ids

    verdict = verdict_of([generation.token_ids for generation in decoded("mtp", shape, commit)], again)
    assert verdict.num_tokens == len(prompts()) * NUM_TOKENS
    assert verdict.is_lossless, verdict.differences


def test_undrafted_tokens_are_those_of_stock_transformers() -> None:
    def again(context: list[int], n: int) -> list[int]:
        return stock_generate(model(), context, n).token_ids

    verdict = verdict_of([again(list(prompt), NUM_TOKENS) for prompt in prompts()], again)
    assert verdict.num_tokens == len(prompts()) * NUM_TOKENS
    assert verdict.is_lossless, verdict.differences


def test_trees_accept_more_than_chains_and_not_only_first_siblings() -> None:
    chain, tree = decoded("mtp", "chain", "reconstruct"), decoded("mtp", "tree", "reconstruct")
    lengths = [
        sum(len(g.token_ids) - 1 for g in runs) / sum(g.num_verify_steps for g in runs) for runs in (chain, tree)
    ]
    assert lengths[1] > lengths[0] > 1.5
    assert max(generation.not_first_sibling_share for generation in tree) > 0
    assert all(generation.not_first_sibling_share == 0 for generation in chain)


def test_each_nodes_logits_are_its_root_paths_run_as_a_chain() -> None:
    """Rows of the model's own draft trees, after a real prompt."""
    from treewy.cache import Batch
    from treewy.draft import Root
    from treewy.engine.request import Request
    from treewy.engine.scheduler import Scheduler
    from treewy.engine.step import prefill
    from treewy.engine.stream import Detokenizer
    from treewy.packed import pack

    machine_of = engine("mtp", "tree", "reconstruct")
    scheduler = Scheduler(machine_of.cache, machine_of.drafter)
    prompt = list(prompts()[0])
    request = Request(0, prompt, PARAMS, SHAPES["tree"], NUM_TOKENS, Detokenizer(None))
    scheduler.add(request)
    scheduler.admit()
    try:
        while scheduler.prefilling():
            prefill(machine_of._machine, [request], 64)
        slot = request.slot
        assert slot is not None
        ((tree, _),) = machine_of.drafter.propose([Root(slot, request.output[-1], SHAPES["tree"])])
        assert tree.tokens is not None

        def logits(draft: DraftTree) -> torch.Tensor:
            batch = Batch(pack([draft]), torch.tensor(draft.tokens), (slot,))
            return machine_of.target.verify(batch, machine_of.cache).logits

        whole = logits(tree)
        scale = whole.abs().max()
        for node in range(tree.num_rows):
            chain = tree.select(tree.path(node))
            difference = (logits(chain)[-1] - whole[node]).abs().max() / scale
            assert difference < HF_LOGITS, (node, difference)
    finally:
        scheduler.release(request)
