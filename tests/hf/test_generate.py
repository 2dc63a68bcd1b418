"""`treewy.generate` on a model the caller already has: same tokens as `model.generate`, and the model as it was."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5ForConditionalGeneration

import treewy
from fixtures import EOS, VOCAB, write_checkpoint
from hf_steps import continuation, state_of
from treewy.cache import POLICIES
from treewy.errors import RequestError, ShapeError, TreeWYError, UnsupportedError
from treewy.hf import attach
from treewy.hf.checkpoint import load_mtp_weights
from treewy.hf.load import build_engine
from treewy.ops import gdn
from treewy.tree import DraftTree

TREE = DraftTree.from_widths([3, 2])
PROMPTS = [[0, 0, 0, 11, 5], [9, 3, 44, 2, 60], [0, 8, 8, 8, 8]]
MASK = [[0, 0, 0, 1, 1], [1] * 5, [0, 1, 1, 1, 1]]


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(PROMPTS), torch.tensor(MASK)


@pytest.fixture
def unchanged(text_model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model, checked to be afterwards what it was before."""
    before = state_of(text_model)
    logits = text_model(torch.tensor([[1, 2, 3]])).logits
    yield text_model
    assert state_of(text_model) == before
    assert torch.equal(text_model(torch.tensor([[1, 2, 3]])).logits, logits)


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("shape", [None, TREE])
def test_equals_generate(model: PreTrainedModel, commit: str, shape: DraftTree | None) -> None:
    """A left-padded batch, by the head and by stock: same tokens, same layout."""
    ids, mask = padded()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
    got = treewy.generate(
        model, ids, attention_mask=mask, max_new_tokens=24, shape=shape, commit=commit, ignore_eos=True
    )
    assert torch.equal(got, want)


def test_rows_that_end_early_are_padded(text_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of `model.generate`: rows that met their end filled up on the right, pad token and width included."""
    ids, mask = padded()
    full = treewy.generate(text_model, ids, attention_mask=mask, max_new_tokens=24, ignore_eos=True)
    eos = int(full[1, 5 + 6])
    monkeypatch.setattr(text_model.generation_config, "eos_token_id", eos)
    for pad in (None, 77):
        monkeypatch.setattr(text_model.generation_config, "pad_token_id", pad)
        want = text_model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        got = treewy.generate(text_model, ids, attention_mask=mask, max_new_tokens=24, shape=TREE)
        assert torch.equal(got, want)
        assert (got[1, 5 + 7 :] == (eos if pad is None else pad)).all()


def test_several_end_tokens(text_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation config may list them; the first to come ends the row."""
    ids = torch.tensor([PROMPTS[1]])
    text = treewy.generate(text_model, ids, max_new_tokens=24, ignore_eos=True)[0, 5:].tolist()
    monkeypatch.setattr(text_model.generation_config, "eos_token_id", [text[9], EOS, text[4]])
    ends = min(text.index(text[9]), text.index(text[4]))
    got = treewy.generate(text_model, ids, max_new_tokens=24)
    assert got[0, 5:].tolist() == text[: ends + 1]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("draft", ["mtp", "model", "none"])
def test_the_model_is_left_as_it_was(
    text_model: PreTrainedModel, request: pytest.FixtureRequest, draft: str, implementation: str
) -> None:
    request.addfinalizer(lambda: text_model.set_attn_implementation("sdpa"))
    text_model.set_attn_implementation(implementation)
    unchanged = request.getfixturevalue("unchanged")
    assert unchanged.config._attn_implementation == implementation
    ids, mask = padded()
    draft_model = unchanged if draft == "model" else None
    treewy.generate(
        unchanged, ids, attention_mask=mask, max_new_tokens=8, draft=draft, draft_model=draft_model, shape=TREE
    )


@pytest.mark.parametrize("call", [1, 3, 11])
@pytest.mark.parametrize("place", ["mixer", "attention", "commit"])
def test_the_model_is_left_as_it_was_after_an_exception(
    unchanged: PreTrainedModel, place: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault G12: raised in a mixer, in the attention function (the target's or the head's), or between forwards."""
    owner, name = {
        "mixer": (gdn, "finish_gates"),
        "attention": (attach.AttentionInterface._global_mapping, attach.ATTENTION_NAME),
        "commit": (gdn, "commit"),
    }[place]
    calls = 0
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def planted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("planted")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        if isinstance(owner, dict):
            patch.setitem(owner, name, planted)
        else:
            patch.setattr(owner, name, planted)
        with pytest.raises(RuntimeError, match="planted"):
            treewy.generate(unchanged, padded()[0], max_new_tokens=8, shape=TREE)
    assert calls == call


def test_a_wrapped_mixer_is_refused_and_kept(text_model: PreTrainedModel) -> None:
    """A wrapper on a mixer (offloading hooks are such) would be passed over, and with it what it is for."""
    mixer = text_model.model.layers[1].linear_attn
    original = mixer.forward

    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    mixer.forward = wrapper
    try:
        with pytest.raises(UnsupportedError, match=r"layer 1 .*wrapper"):
            treewy.generate(text_model, torch.tensor([[1, 2]]), max_new_tokens=4, ignore_eos=True)
        assert mixer.forward is wrapper
    finally:
        del mixer.forward
    assert treewy.generate(text_model, torch.tensor([[1, 2]]), max_new_tokens=4, ignore_eos=True).shape == (1, 6)


@pytest.mark.parametrize(
    ("option", "value"),
    [("repetition_penalty", 1.5), ("min_new_tokens", 3), ("suppress_tokens", [5]), ("num_beams", 2)],
)
def test_penalties_of_the_generation_config_are_refused(
    text_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, option: str, value: object
) -> None:
    """Fault H17: penalties silently ignored with drafting."""
    monkeypatch.setattr(text_model.generation_config, option, value)
    with pytest.raises(UnsupportedError, match=option):
        treewy.generate(text_model, torch.tensor([[1, 2]]), max_new_tokens=4)


def test_inference_mode_of_the_caller_does_not_matter(text_model: PreTrainedModel, text_checkpoint: Path) -> None:
    prompt, params = [9, 3, 44], treewy.SamplingParams(max_new_tokens=8, ignore_eos=True)
    with torch.inference_mode():
        inside = build_engine(text_model, draft="mtp", folder=text_checkpoint, shape=TREE)
    outside = build_engine(text_model, draft="mtp", folder=text_checkpoint, shape=TREE)
    runs = []
    for engine in (inside, outside):
        runs.append(engine.generate([prompt], params)[0].token_ids)
        with torch.inference_mode():
            runs.append(engine.generate([prompt], params)[0].token_ids)
        runs.append(engine.generate([prompt], params)[0].token_ids)
    assert all(run == runs[0] for run in runs)


def test_plain_forwards_between_the_steps_of_a_stream(text_model: PreTrainedModel, text_checkpoint: Path) -> None:
    """Nothing stays attached while a stream waits: the model answers as ever, and its `generate` works."""
    prompt = [9, 3, 44]
    text = continuation(text_model, prompt, 16)
    want = text_model(torch.tensor([prompt])).logits
    engine = build_engine(text_model, draft="mtp", folder=text_checkpoint, shape=TREE)
    got: list[int] = []
    for event in engine.stream([prompt], treewy.SamplingParams(max_new_tokens=16, ignore_eos=True)):
        got += event.token_ids
        assert torch.equal(text_model(torch.tensor([prompt])).logits, want)
        assert continuation(text_model, prompt, 2) == text[:5]
    assert prompt + got == text


def test_a_multimodal_model_lends_its_text_decoder(checkpoints, text_model: PreTrainedModel) -> None:
    """The class that the hub's config names works as well: same text weights, same tokens."""
    folder = checkpoints("multimodal")
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[9, 3, 44]])
    got = treewy.generate(whole, ids, max_new_tokens=12, shape=TREE, ignore_eos=True)
    assert got[0].tolist() == continuation(text_model, [9, 3, 44], 12)


def test_the_head_may_lie_elsewhere(text_checkpoint: Path, tmp_path: Path) -> None:
    """A model loaded from a folder without a head drafts with one from another folder; without it, it says what it lacks."""
    bare = write_checkpoint(tmp_path / "bare", head=False)
    model = AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32).eval()
    ids = torch.tensor([[9, 3, 44]])
    with pytest.raises(RequestError, match=r"mtp\.fc\.weight"):
        treewy.generate(model, ids)
    got = treewy.generate(model, ids, checkpoint=text_checkpoint, max_new_tokens=12, ignore_eos=True)
    assert got[0].tolist() == continuation(model, [9, 3, 44], 12)
    assert load_mtp_weights(bare) is None


def test_a_model_that_was_not_loaded(
    text_model: PreTrainedModel, text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No head is picked up from wherever the process happens to stand; given one, or none to draft with, it decodes."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(text_model.config)).eval()
    model.config.name_or_path = ""
    model.load_state_dict(text_model.state_dict())
    monkeypatch.chdir(text_checkpoint)
    ids = torch.tensor([[9, 3, 44]])
    with pytest.raises(RequestError, match=r"mtp\.fc\.weight; this model was not loaded from one"):
        treewy.generate(model, ids)
    want = continuation(text_model, [9, 3, 44], 6)
    for options in ({"checkpoint": text_checkpoint}, {"draft": "none"}):
        got = treewy.generate(model, ids, max_new_tokens=6, ignore_eos=True, **options)
        assert got[0].tolist() == want


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_ids": torch.tensor([1, 2])}, ShapeError, r"\[batch, prompt\]; got shape \(2,\)"),
        ({"attention_mask": torch.ones(1, 2, dtype=torch.int64)}, ShapeError, "shape of input_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, ShapeError, "Padding must be on the left"),
        ({"attention_mask": torch.zeros(1, 3, dtype=torch.int64)}, RequestError, "prompt 0 is empty"),
        ({"input_ids": torch.tensor([[1, VOCAB]])}, RequestError, f"prompt 0 holds {VOCAB}"),
        ({"draft": "eagle"}, UnsupportedError, "mtp, ngram, model, none; got 'eagle'"),
        ({"commit": "replay"}, UnsupportedError, "store_all, reconstruct, ring"),
        ({"max_new_tokens": 0}, RequestError, "at least 1"),
        ({"checkpoint": "/nowhere"}, RequestError, "'/nowhere' is neither"),
    ],
)
def test_bad_arguments(unchanged: PreTrainedModel, options: dict, error: type[TreeWYError], message: str) -> None:
    # Unwrapped where the tests' own check of annotations would speak first.
    generate = inspect.unwrap(treewy.generate) if error is ShapeError else treewy.generate
    with pytest.raises(error, match=message):
        generate(unchanged, **{"input_ids": torch.tensor([[1, 2, 3]]), **options})


def test_a_model_in_training_mode_is_refused(text_model: PreTrainedModel) -> None:
    text_model.train()
    try:
        with pytest.raises(RequestError, match=r"eval mode.*Call model\.eval"):
            treewy.generate(text_model, torch.tensor([[1]]))
        assert text_model.training
    finally:
        text_model.eval()
