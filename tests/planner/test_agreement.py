"""The planner's bytes are the engine's bytes: every part, in real storages, while a tree is pending."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import treewy
from fixtures import write_checkpoint
from toy_steps import make_pool, start, verify
from treewy.draft import MTPDrafter
from treewy.engine import Engine, SamplingParams
from treewy.hf import HFMTPHead, HFTarget
from treewy.hf.checkpoint import SHIPPED
from treewy.model import ToyConfig, ToyTarget
from treewy.planner import ModelSpec, PerSequence, find_model, per_sequence
from treewy.planner.model import MLPSpec
from treewy.planner.weights import counted
from treewy.tree import DraftTree

SHAPES = {"chain": DraftTree.chain(3), "tree": DraftTree.from_widths([3, 3, 3])}
PROMPT = [5, 80, 33, 7, 19, 2, 64, 90, 11]
# Not the family's shape: an odd share of layers, another window, other head counts and dims.
ODD = {
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def check(engine: Engine, spec: ModelSpec, shape: DraftTree, commit: str, *, dtype: str, state_dtype: str) -> None:
    """Compare a first step's peak with the plan: it has the whole tree pending, and no later step holds more."""

    def plan(context: int) -> PerSequence:
        return per_sequence(spec, rows=shape.num_rows, context=context, dtype=dtype, state_dtype=state_dtype)

    params = SamplingParams(max_new_tokens=shape.max_depth + 2, shape=shape, ignore_eos=True)
    stream = engine.stream([PROMPT], params)
    next(stream)
    next(stream)
    length = engine.cache.length(0)
    assert length > len(PROMPT)
    assert isinstance(engine.drafter, MTPDrafter)
    assert engine.drafter.cache.slot_bytes(0) == (0, 0, plan(length).draft_kv)
    part = plan(length)
    history = part.history if commit == "ring" else 0
    assert engine.cache.slot_bytes(0) == (part.state + history, part.conv, part.kv)
    stream.close()

    [generation] = engine.generate([PROMPT], params)
    part = plan(len(PROMPT))
    pending = part.snapshots if commit == "store_all" else part.stash - part.conv_inputs
    assert generation.state_bytes == part.state + history + pending
    assert generation.conv_bytes == part.conv + part.conv_inputs
    assert generation.kv_bytes == part.kv + part.pending_kv
    everything = generation.state_bytes + generation.conv_bytes + generation.kv_bytes
    assert everything + part.draft_kv == part.totals()[commit]


@pytest.mark.parametrize("commit", ["store_all", "reconstruct", "ring"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float32")])
def test_shipped_checkpoint(commit: str, shape: str, dtype: str, state_dtype: str) -> None:
    engine = treewy.load(commit=commit, dtype=dtype, device="cpu")
    check(engine, find_model(str(SHIPPED), dtype).spec, SHAPES[shape], commit, dtype=dtype, state_dtype=state_dtype)


@pytest.mark.parametrize("commit", ["store_all", "reconstruct", "ring"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_model_of_another_shape(tmp_path: Path, commit: str, shape: str, state_dtype: str) -> None:
    folder = write_checkpoint(tmp_path, mamba_ssm_dtype=state_dtype, **ODD)
    spec = find_model(str(folder), "float32").spec
    assert spec.state_dtype == state_dtype
    engine = treewy.load(folder, commit=commit, dtype="float32", device="cpu")
    check(engine, spec, SHAPES[shape], commit, dtype="float32", state_dtype=state_dtype)


@pytest.mark.parametrize("commit", ["store_all", "reconstruct", "ring"])
@pytest.mark.parametrize("shape", SHAPES)
def test_toy_in_float64(commit: str, shape: str) -> None:
    """Fault J03: what is planned is what is held, window and all, to the byte. Everything in float64, records too."""
    toy = ToyConfig(layers="ddada", key_dim=6, value_dim=10, conv_width=5)
    target = ToyTarget(toy, seed=3)
    pool = make_pool(target, commit)
    tree = SHAPES[shape].with_tokens(range(SHAPES[shape].num_rows))
    slot = start(target, pool, [5, 9, 1, 30, 7])
    held = verify(target, pool, [tree], [slot]).pending.bytes()
    part = per_sequence(
        toy_spec(toy), rows=tree.num_rows, context=pool.length(slot), dtype="float64", state_dtype="float64"
    )
    history = part.history if commit == "ring" else 0
    assert pool.slot_bytes(slot) == (part.state + history, part.conv, part.kv)
    pending = part.snapshots if commit == "store_all" else part.stash - part.conv_inputs
    assert held == (pending, part.conv_inputs, part.pending_kv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["shipped", "text", "multimodal", "tied", "shards"])
def test_weights_are_those_the_engine_loads(
    tmp_path: Path, checkpoints: Callable[[str], Path], case: str, dtype: str
) -> None:
    """Cast to the model's dtype, tied once, no vision tower, the head apart; the count from sizes agrees."""
    if case == "shipped":
        folder = SHIPPED
    elif case in ("text", "multimodal"):
        folder = checkpoints(case)
    else:
        folder = write_checkpoint(tmp_path, shards=3 if case == "shards" else 1, tie_word_embeddings=case == "tied")
    source = find_model(str(folder), dtype)
    engine = treewy.load(folder, dtype=dtype, device="cpu")
    assert isinstance(engine.target, HFTarget)
    assert isinstance(engine.drafter, MTPDrafter)
    assert isinstance(engine.drafter.head, HFMTPHead)
    assert source.weights.target == loaded_bytes(engine.target.model)
    assert source.weights.head == loaded_bytes(engine.drafter.head.module)
    assert source.weights[:2] == counted(source.spec, dtype)[:2]


def loaded_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    """The files decide: the config claims a head that is not there."""
    source = find_model(str(write_checkpoint(tmp_path, head=False)), "float32")
    assert source.spec.num_head_layers == 0
    assert source.weights.head == 0


def toy_spec(toy: ToyConfig) -> ModelSpec:
    return ModelSpec(
        vocab_size=toy.vocab_size,
        hidden_size=toy.hidden,
        num_linear_layers=toy.layers.count("d"),
        num_attention_layers=toy.layers.count("a"),
        num_head_layers=0,
        num_key_heads=toy.num_key_heads,
        num_value_heads=toy.num_value_heads,
        key_dim=toy.key_dim,
        value_dim=toy.value_dim,
        conv_width=toy.conv_width,
        num_heads=toy.num_heads,
        num_kv_heads=toy.num_kv_heads,
        head_dim=toy.head_dim,
        mlp=MLPSpec(toy.hidden),
        output_gate=False,
        tied=False,
        max_len=toy.max_len,
        state_dtype="float64",
    )
