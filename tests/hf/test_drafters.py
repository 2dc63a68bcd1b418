"""Drafters by name over checkpoints: n-grams, and a second model with the target's tokens."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import treewy
from fixtures import VOCAB, write_checkpoint
from hf_steps import continuation
from treewy.draft import Budget, ModelDrafter, NgramDrafter, Shape
from treewy.errors import RequestError

PROMPT = [5, 80, 33, 5, 80]
BUDGET = Budget(9, 3, 3)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of fewer layers and a shorter context, with the same tokens."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return write_checkpoint(
        tmp_path_factory.mktemp("smaller"), seed=4, head=False, max_position_embeddings=20, **layers
    )


@pytest.mark.parametrize("shape", [None, BUDGET])
def test_loaded_by_name(text_checkpoint: Path, text_model: PreTrainedModel, smaller: Path, shape: Shape | None) -> None:
    """Each decodes as the target alone does, past the end of the draft model's context."""
    params = treewy.SamplingParams(max_new_tokens=24, ignore_eos=True)
    want = continuation(text_model, PROMPT, 24)[len(PROMPT) :]
    for draft, source, kind in (("ngram", None, NgramDrafter), ("model", smaller, ModelDrafter)):
        engine = treewy.load(text_checkpoint, draft=draft, draft_model=source, shape=shape, dtype="float32")
        assert isinstance(engine.drafter, kind)
        result = engine.generate([PROMPT], params)[0]
        assert result.token_ids == want
        assert draft == "ngram" or result.num_drafted > 0


def test_the_draft_model_has_the_targets_dtype(text_checkpoint: Path, smaller: Path) -> None:
    drafter = treewy.load(text_checkpoint, draft="model", draft_model=smaller, dtype="bfloat16").drafter
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model.dtype == torch.bfloat16


def test_generate_takes_a_model_or_where_it_is(text_model: PreTrainedModel, smaller: Path) -> None:
    """A folder; or a model in memory, the target itself if need be, all of whose drafts then stand."""
    ids, want = torch.tensor([PROMPT]), continuation(text_model, PROMPT, 13)
    for source in (smaller, str(smaller), text_model):
        got = treewy.generate(
            text_model, ids, draft="model", draft_model=source, shape=BUDGET, max_new_tokens=13, ignore_eos=True
        )
        assert got[0].tolist() == want
    assert treewy.generate(text_model, ids, draft="ngram", max_new_tokens=13, ignore_eos=True)[0].tolist() == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "model"}, "'model' needs a model to draft with; got none"),
        ({"draft": "mtp", "draft_model": "given"}, "for draft 'model' only; got one with draft 'mtp'"),
        ({"draft": "none", "draft_model": "given"}, "for draft 'model' only; got one with draft 'none'"),
        ({"draft": "model", "draft_model": "/nowhere"}, "'/nowhere' is neither"),
    ],
)
def test_a_draft_model_belongs_to_its_drafter(
    text_model: PreTrainedModel, text_checkpoint: Path, smaller: Path, options: dict, message: str
) -> None:
    if options.get("draft_model") == "given":
        options = options | {"draft_model": smaller}
    with pytest.raises(RequestError, match=message):
        treewy.generate(text_model, torch.tensor([[1]]), **options)
    with pytest.raises(RequestError, match=message):
        treewy.load(text_checkpoint, **options)


def _rename_a_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {token.replace("t7", "u7"): n for token, n in content["model"]["vocab"].items()}
    file.write_text(json.dumps(content))


def test_other_tokens_are_refused(text_checkpoint: Path, text_model: PreTrainedModel, tmp_path: Path) -> None:
    """As many tokens with other meanings, or more of them."""
    renamed = write_checkpoint(tmp_path / "renamed")
    _rename_a_token(renamed)
    with pytest.raises(RequestError, match=r"must have the target's tokens; those of .*renamed are others"):
        treewy.load(text_checkpoint, draft="model", draft_model=renamed)
    larger = write_checkpoint(tmp_path / "larger", vocab_size=VOCAB + 8)
    for decode in (
        lambda: treewy.load(text_checkpoint, draft="model", draft_model=larger),
        lambda: treewy.generate(text_model, torch.tensor([[1]]), draft="model", draft_model=larger),
    ):
        with pytest.raises(RequestError, match=f"target's vocabulary of {VOCAB} tokens; it has {VOCAB + 8}"):
            decode()
