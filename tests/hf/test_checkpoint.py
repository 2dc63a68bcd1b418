"""Checkpoint folders: both layouts, shards, tied embeddings and dtypes load; what is broken is named before anything runs."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import treewy
from fixtures import MAX_LEN, VOCAB, write_checkpoint
from hf_steps import continuation, forward, rms_error
from tolerances import HF_BFLOAT16_FACTOR
from toy_steps import feed, make_pool
from treewy.cache import POLICIES
from treewy.draft import MTPDrafter, NoDrafter
from treewy.engine import Engine, SamplingParams
from treewy.errors import RequestError, TreeWYError, UnsupportedError
from treewy.hf import HFTarget
from treewy.hf.checkpoint import load_mtp_weights, resolve
from treewy.tree import DraftTree

PROMPT, TREE = [5, 80, 33], DraftTree.from_widths([3, 2])
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, shape=TREE)


def test_both_layouts_are_one_model(checkpoints: Callable[[str], Path]) -> None:
    """The same weights under text-only and multimodal names give the same tokens, and both find their head."""
    engines = [treewy.load(checkpoints(layout)) for layout in ("text", "multimodal")]
    assert all(isinstance(engine.drafter, MTPDrafter) for engine in engines)
    texts = [engine.generate([PROMPT], PARAMS)[0].token_ids for engine in engines]
    assert texts[0] == texts[1] == continuation(engines[0].target.model, PROMPT, 16)[3:]


def test_load_reads_text_and_gives_text(text_checkpoint: Path) -> None:
    """The folder's tokenizer serves prompts, results and stop strings; the config gives the end token and the limit."""
    engine = treewy.load(text_checkpoint)
    by_text = engine.generate(["t5 t80 t33"], PARAMS)[0]
    assert by_text.prompt_ids == PROMPT
    assert by_text.text == "".join(f"t{token}" for token in by_text.token_ids)
    stop = f"t{by_text.token_ids[4]}t"
    stopped = engine.generate([PROMPT], SamplingParams(max_new_tokens=16, stop=[stop]))[0]
    assert stopped.finish_reason == "stop"
    assert by_text.text.startswith(stopped.text)
    assert stop not in stopped.text
    with pytest.raises(RequestError, match=f"context of {MAX_LEN} tokens"):
        engine.generate([[1] * MAX_LEN])


def test_the_end_token_ends(tmp_path: Path, text_checkpoint: Path) -> None:
    """From config.json, or from generation_config.json where there is one."""
    free = treewy.load(text_checkpoint, draft="none").generate([PROMPT], PARAMS)[0].token_ids
    folder = write_checkpoint(tmp_path, eos_token_id=free[5])
    params = SamplingParams(max_new_tokens=16)
    assert treewy.load(folder).generate([PROMPT], params)[0].token_ids == free[: free.index(free[5]) + 1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[3], free[9]]}))
    ends = min(free.index(free[3]), free.index(free[9]))
    assert treewy.load(folder).generate([PROMPT], params)[0].token_ids == free[: ends + 1]


def test_shards(tmp_path: Path) -> None:
    """Weights spread over files, the head's among them."""
    engine = treewy.load(write_checkpoint(tmp_path, shards=3))
    assert isinstance(engine.drafter, MTPDrafter)
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == continuation(engine.target.model, PROMPT, 16)[3:]


@pytest.mark.parametrize("layout", ["text", "multimodal"])
def test_tied_embeddings(tmp_path: Path, layout: str) -> None:
    """No lm_head tensor on disk: the embedding is the LM head, of the target and of the head."""
    engine = treewy.load(write_checkpoint(tmp_path, layout, tie_word_embeddings=True))
    model = engine.target.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert engine.drafter.head.lm_head is model.lm_head
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == continuation(model, PROMPT, 16)[3:]


def test_other_ratios_of_heads(tmp_path: Path) -> None:
    """Fault K03: value head j uses key head j // (HV / H); ratio 3, with key and value dims that differ."""
    folder = write_checkpoint(tmp_path, linear_num_value_heads=6, linear_value_head_dim=8, num_key_value_heads=1)
    engine = treewy.load(folder)
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == continuation(engine.target.model, PROMPT, 16)[3:]


def test_without_a_head(tmp_path: Path) -> None:
    """Faults L10 and L11: said plainly, by name, at load, never drafted without; asked for no drafts, the checkpoint serves."""
    folder = write_checkpoint(tmp_path, head=False)
    assert load_mtp_weights(folder) is None
    with pytest.raises(RequestError, match=r"holds mtp\.fc\.weight.*draft 'none'"):
        treewy.load(folder)
    engine = treewy.load(folder, draft="none")
    assert isinstance(engine.drafter, NoDrafter)
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == continuation(engine.target.model, PROMPT, 16)[3:]


def test_a_head_of_another_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(32, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"mtp\.fc\.weight should be \(64, 128\) and is \(32, 64\)"):
        treewy.load(folder)


def no_folder(folder: Path) -> Path:
    return folder / "nowhere"


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def tokenizer_of_no_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_to_the_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00\x01")


def config_of_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def a_tensor_short(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.linear_attn.out_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def a_tensor_misshapen(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.linear_attn.out_proj.weight"] = torch.zeros(4, 4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def an_index_of_a_missing_shard(folder: Path) -> None:
    write_checkpoint(folder, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def an_index_of_no_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[")


def an_index_without_a_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (no_folder, "nowhere.*is neither"),
        (no_config, r"must hold config\.json"),
        (no_weights, r"model\.safetensors is missing"),
        (no_tokenizer, r"must hold its tokenizer.*tokenizer\.json"),
        (tokenizer_of_no_json, "tokenizer of"),
        (truncated, r"model\.safetensors of"),
        (cut_to_the_header, r"model\.safetensors of"),
        (config_of_no_json, r"config\.json of"),
        (a_tensor_short, r"lacks model\.layers\.2\.linear_attn\.out_proj\.weight"),
        (a_tensor_misshapen, r"out_proj\.weight of .* is \(4, 4\) and should be"),
        (an_index_of_a_missing_shard, r"model-00002-of-00002\.safetensors is missing"),
        (an_index_of_no_json, r"index\.json of"),
        (an_index_without_a_map, r"weight_map.*index\.json does not"),
    ],
)
def test_broken_checkpoints(tmp_path: Path, broken: Callable[[Path], Path | None], message: str) -> None:
    """Each is a RequestError that names the file or tensor; nothing foreign comes through."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    folder = broken(folder) or folder
    with pytest.raises(RequestError, match=message):
        treewy.load(folder)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("draft", ["mtp", "none"])
def test_other_model_types(tmp_path: Path, draft: str) -> None:
    """A model that loads but has no gated-delta layers of a known kind is refused by its type."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = write_checkpoint(tmp_path)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
    model.save_pretrained(folder)
    with pytest.raises(UnsupportedError, match=r"qwen3_5_text, .*olmo_hybrid; got 'llama'"):
        treewy.load(folder, draft=draft)
    with pytest.raises(UnsupportedError, match=r"qwen3_5_text, .*olmo_hybrid; got 'llama'"):
        HFTarget(model.eval())


def test_a_type_nobody_knows(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen9"}))
    with pytest.raises(UnsupportedError, match="qwen9"):
        treewy.load(folder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft": "eagle"}, UnsupportedError, "mtp, ngram, model, none; got 'eagle'"),
        ({"commit": "replay"}, UnsupportedError, "store_all, reconstruct, ring; got 'replay'"),
        ({"dtype": "float8"}, RequestError, "float32, bfloat16; got 'float8'"),
    ],
)
def test_bad_options(text_checkpoint: Path, options: dict, error: type[TreeWYError], message: str) -> None:
    with pytest.raises(error, match=message):
        treewy.load(text_checkpoint, **options)


@pytest.mark.parametrize("name", ["no/such/place", "./here", "~nobody/x", "/nowhere", "single"])
def test_names_that_are_neither_folder_nor_hub_id(name: str) -> None:
    """Refused without asking any network."""
    with pytest.raises(RequestError, match="is neither"):
        resolve(name)


@pytest.mark.parametrize("commit", POLICIES)
def test_bfloat16(text_checkpoint: Path, commit: str) -> None:
    """Weights, windows and keys in bfloat16, states in the dtype the config asks for; logits err as stock's do."""
    engine = treewy.load(text_checkpoint, dtype="bfloat16", commit=commit)
    state, keys = engine.cache.layers[0].state, engine.cache.layers[3].keys
    assert (engine.target.dtype, state.dtype, keys.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    prompt = list(range(3, 43))
    pool = make_pool(engine.target, commit)
    exact = forward(copy.deepcopy(engine.target.model).float(), prompt).logits
    stock_error = rms_error(forward(engine.target.model, prompt).logits, exact)
    assert 0 < rms_error(feed(engine.target, pool, pool.allocate(), prompt), exact) < HF_BFLOAT16_FACTOR * stock_error

    result = engine.generate([PROMPT, prompt], [PARAMS, PARAMS])
    assert all(len(r.token_ids) == 16 and max(r.token_ids) < VOCAB for r in result)
    again = engine.generate([PROMPT, prompt], [PARAMS, PARAMS])
    assert [r.token_ids for r in again] == [r.token_ids for r in result]


def test_a_bfloat16_state(tmp_path: Path) -> None:
    """A config may ask for a bfloat16 state: then snapshots and committed states are half the size."""
    folder = write_checkpoint(tmp_path, mamba_ssm_dtype="bfloat16")
    engine: Engine = treewy.load(folder, dtype="bfloat16", commit="store_all")
    assert engine.cache.layers[0].state.dtype == torch.bfloat16
    result = engine.generate([PROMPT], PARAMS)[0]
    assert result.state_bytes == (1 + TREE.num_rows) * 3 * 4 * 16 * 16 * 2
    assert len(result.token_ids) == 16
