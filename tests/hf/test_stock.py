"""The outside judge: `model.generate`, asked for as many tokens as the engine gives."""

from transformers import PreTrainedModel

from hf_steps import forward
from treewy.hf.stock import stock_generate


def test_end_tokens_are_those_asked_for(text_model: PreTrainedModel, monkeypatch) -> None:
    """None by default, also where the model's own generation config has some; the first of those asked for ends the text."""
    free = stock_generate(text_model, [5, 80, 33], 24).token_ids
    assert len(free) == 24
    monkeypatch.setattr(text_model.generation_config, "eos_token_id", free[3])
    assert stock_generate(text_model, [5, 80, 33], 24).token_ids == free
    ends = min(free.index(free[9]), free.index(free[6]))
    assert stock_generate(text_model, [5, 80, 33], 24, [free[9], free[6]]).token_ids == free[: ends + 1]


def test_its_tokens_are_the_forwards_choices(text_model: PreTrainedModel) -> None:
    """Stock's cached decoding agrees with its own full forward: the judge is sound on these checkpoints."""
    stock = stock_generate(text_model, [5, 80, 33], 32)
    choices = forward(text_model, [5, 80, 33, *stock.token_ids[:-1]]).logits[2:].argmax(-1).tolist()
    assert choices == stock.token_ids
    assert stock.tokens_per_s > 0
