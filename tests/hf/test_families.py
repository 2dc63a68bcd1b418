"""Every model family, against transformers' own full forward and `generate`. Float32."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5MoeForConditionalGeneration

import treewy
from fixtures_families import LAYOUTS, MODELS, WITH_HEAD, family_weights
from hf_steps import continuation, forward, relative_error, rms_error, state_of
from tolerances import HF_BFLOAT16_FACTOR, HF_LOGITS, NEIGHBOURS_FLOAT32
from toy_steps import feed, make_pool, start, storages, verify
from treewy.cli.main import main
from treewy.engine import SamplingParams
from treewy.hf import HFTarget
from treewy.ops import gdn
from treewy.tree import DraftTree

POLICIES = ["reconstruct", "store_all"]
PROMPTS = [[3], [7, 7, 7, 7], list(range(20, 61))]
SHAPES = [DraftTree.from_widths([3, 2]), DraftTree([-1, 0, 0, 0, 3]), DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6])]
TREE = DraftTree.from_widths([3, 2])


def drafted(seed: int = 0) -> list[DraftTree]:
    generator = torch.Generator().manual_seed(seed)
    return [shape.with_tokens(torch.randint(100, (shape.num_rows,), generator=generator).tolist()) for shape in SHAPES]


@pytest.fixture(params=MODELS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(families: Callable, layout: str) -> PreTrainedModel:
    return families(layout)[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_one_model(families: Callable, name: str) -> None:
    """Fused and single experts, multimodal names, own convolutions, shards: what transformers loads is what was written."""
    got, want = families(name)[1].state_dict(), family_weights(LAYOUTS[name].text, 0, head=False)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("commit", POLICIES)
def test_every_root_path_is_a_plain_forward(model: PreTrainedModel, commit: str) -> None:
    """A batch of three trees: each row's logits and hidden state are those of prefix + path run whole by transformers."""
    target = HFTarget(model)
    pool = make_pool(target, commit, poison=True)
    slots = [start(target, pool, prompt) for prompt in PROMPTS]
    before = storages(pool)
    batch = verify(target, pool, drafted(), slots)
    assert storages(pool) == before
    for seq, (prompt, tree) in enumerate(zip(PROMPTS, drafted(), strict=True)):
        for row in range(tree.num_rows):
            at = batch.pending.tree.starts[seq] + row
            want = forward(model, prompt + [tree.tokens[node] for node in tree.path(row)])
            assert relative_error(batch.logits[at], want.logits[-1]) < HF_LOGITS
            assert relative_error(batch.hidden[at], want.hidden[-1]) < HF_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
def test_prefill_in_chunks_then_decode(model: PreTrainedModel, commit: str) -> None:
    """Fault B05: chunks around the conv window's width, then trees of which a path is committed: as the same tokens run whole.

    OLMo has a convolution each for queries, keys and values: all three windows move.
    """
    target, text, got = HFTarget(model), [], []
    pool = make_pool(target, commit, poison=True)
    slot = pool.allocate()
    for chunk in (list(range(3, 9)), [50], [61, 7]):
        got.append(feed(target, pool, slot, chunk))
        text += chunk
    for step in range(6):
        tree = drafted(step)[step % 3]
        path = tree.path((5, 4, 8, 2, 0, 6)[step])
        verified = verify(target, pool, [tree], [slot])
        pool.commit(verified.pending, [path])
        got.append(verified.logits[path])
        text += [tree.tokens[node] for node in path]
    assert relative_error(torch.cat(got), forward(model, text).logits) < HF_LOGITS


@pytest.mark.parametrize(
    ("layout", "commit"),
    [(name, "reconstruct") for name in MODELS] + [(name, "store_all") for name in ("moe", "next", "olmo")],
    indirect=["layout"],
)
def test_equals_generate(model: PreTrainedModel, layout: str, commit: str) -> None:
    """Rung 6: 40 greedy tokens of a left-padded batch, drafted in a tree or not at all, and the model as it was."""
    ids, mask = torch.tensor([[0, 0, 11, 5], [9, 3, 44, 2]]), torch.tensor([[0, 0, 1, 1], [1] * 4])
    want = model.generate(
        ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    before = state_of(model)
    draft = "mtp" if layout in WITH_HEAD else "none"
    got = treewy.generate(
        model, ids, attention_mask=mask, max_new_tokens=40, draft=draft, shape=TREE, commit=commit, ignore_eos=True
    )
    assert torch.equal(got, want)
    assert len(set(got[0].tolist())) > 8
    assert state_of(model) == before


def test_the_model_is_left_as_it_was_after_an_exception(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, logits = state_of(model), model(torch.tensor([[1, 2, 3]])).logits

    def planted(*args, **kwargs):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(gdn, "verify", planted)
        with pytest.raises(RuntimeError, match="planted"):
            treewy.generate(model, torch.tensor([[1, 2]]), max_new_tokens=4, draft="none")
    assert state_of(model) == before
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, logits)


@pytest.mark.parametrize("name", ["olmo", "olmo-rope", "olmo-positive"])
def test_beta_reaches_two(families: Callable, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixtures that allow negative eigenvalues have them, and only those; otherwise nothing above tells 1 from 2."""
    seen: list[float] = []
    finish = gdn.finish_gates

    def spy(*args, **kwargs):
        g, beta = finish(*args, **kwargs)
        seen.append(float(beta.max()))
        return g, beta

    monkeypatch.setattr(gdn, "finish_gates", spy)
    target = HFTarget(families(name)[1])
    start(target, make_pool(target), PROMPTS[2])
    assert len(seen) == 3
    assert all(1.7 < beta < 2 for beta in seen) if name != "olmo-positive" else max(seen) < 1


def test_rope_and_its_absence(families: Callable) -> None:
    """Released OLMo checkpoints have no rotary table; the layouts here have both kinds."""
    assert families("olmo")[1].model.rotary_emb is None
    assert families("olmo-rope")[1].model.rotary_emb is not None


def test_the_layouts_differ_in_heads() -> None:
    """One, two and three value heads a key head, and key dims that are not value dims, for each kind of mixer."""
    shapes = {}
    for text, *_ in LAYOUTS.values():
        ratio, rest = divmod(text["linear_num_value_heads"], text["linear_num_key_heads"])
        assert rest == 0
        assert text["linear_key_head_dim"] != text["linear_value_head_dim"]
        shapes.setdefault(text["model_type"], set()).add(ratio)
    assert shapes == {"qwen3_5_moe_text": {1, 3}, "qwen3_next": {1, 3}, "olmo_hybrid": {1, 2, 3}}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["moe", "next"])
def test_experts_act_row_by_row(families: Callable, name: str, implementation: str) -> None:
    """Whichever implementation of experts the model has: a row beside neighbours, one of them not finite, is the row alone."""
    model = copy.deepcopy(families(name)[1])
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        model.model.embed_tokens.weight[126] = torch.nan
    target = HFTarget(model)
    pool = make_pool(target)
    slots = [start(target, pool, prompt) for prompt in PROMPTS]
    trees = [tree.with_tokens([*tree.tokens[:3], 126, *tree.tokens[4:]]) for tree in drafted()]
    batch = verify(target, pool, trees, slots)
    for seq, (tree, slot) in enumerate(zip(trees, slots, strict=True)):
        alone = verify(target, pool, [tree], [slot]).logits
        here = batch.logits[batch.pending.tree.starts[seq] :][: tree.num_rows]
        broken = [any(tree.tokens[node] == 126 for node in tree.path(row)) for row in range(tree.num_rows)]
        assert [bool(row.isnan().any()) for row in here] == broken
        rows = [row for row, bad in enumerate(broken) if not bad]
        assert len(rows) >= 3
        assert relative_error(here[rows], alone[rows]) < NEIGHBOURS_FLOAT32


def test_routing_differs_from_row_to_row(families: Callable) -> None:
    """The fixtures' routers choose: rows of one forward go to different experts, so that a mix-up of rows would show."""
    for name in ("moe", "next"):
        model = families(name)[1]
        chosen: list[torch.Tensor] = []
        gate = model.model.layers[0].mlp.gate
        hook = gate.register_forward_hook(lambda module, inputs, output, seen=chosen: seen.append(output[2]))
        forward(model, PROMPTS[2])
        hook.remove()
        assert chosen[0].shape == (41, 2)
        assert len(chosen[0].unique()) == 6
        assert len({tuple(row) for row in chosen[0].tolist()}) > 10


@pytest.mark.parametrize("layout", ["moe", "next", "olmo"], indirect=True)
def test_bfloat16(families: Callable, layout: str) -> None:
    """Loads and decodes; logits err as stock's do."""
    folder, exact_model = families(layout)
    draft = "mtp" if layout in WITH_HEAD else "none"
    engine = treewy.load(folder, dtype="bfloat16", draft=draft)
    exact_model = copy.deepcopy(engine.target.model).float()
    prompt = list(range(3, 43))
    exact = forward(exact_model, prompt).logits
    stock_error = rms_error(forward(engine.target.model, prompt).logits, exact)
    pool = make_pool(engine.target)
    assert (engine.target.dtype, pool.layers[0].state.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < rms_error(feed(engine.target, pool, pool.allocate(), prompt), exact) < HF_BFLOAT16_FACTOR * stock_error
    [result] = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert len(result.token_ids) == 12


def test_a_multimodal_model_lends_its_text_decoder(families: Callable) -> None:
    """The class that a hub config names works as well, from either layout of experts."""
    want = continuation(families("moe")[1], [9, 3, 44], 12)
    for name in ("moe-multimodal", "moe-multimodal-experts"):
        folder = families(name)[0]
        whole = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        got = treewy.generate(whole, torch.tensor([[9, 3, 44]]), max_new_tokens=12, shape=TREE, ignore_eos=True)
        assert got[0].tolist() == want


@pytest.mark.parametrize("layout", ["moe-multimodal-experts", "next", "olmo"], indirect=True)
def test_the_command_line(families: Callable, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`treewy generate --model FOLDER`: the tokens of stock transformers."""
    folder, model = families(layout)
    draft = ("--draft", "mtp", "--tree", "3,2") if layout in WITH_HEAD else ("--draft", "none")
    arguments = ["generate", "t9 t3 t44", "--model", str(folder), "--dtype", "float32", "--json"]
    assert main([*arguments, "--max-new-tokens", "16", *draft]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["token_ids"] == continuation(model, [9, 3, 44], 16)[3 : 3 + len(result["token_ids"])]
    assert len(result["token_ids"]) > 8
