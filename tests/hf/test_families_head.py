"""The heads of mixtures and of Qwen3-Next, in both layouts of experts, against transformers' own generic layer."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import treewy
from fixtures_families import KINDS, LAYOUTS, WITH_HEAD, family_weights, split_experts
from hf_steps import forward, relative_error
from mtp_oracle import MTPOracle
from tolerances import HF_LOGITS
from treewy.cache import AttentionSpec, CachePool, get_policy
from treewy.cli.main import main
from treewy.draft import Committed, MTPDrafter, Root
from treewy.errors import RequestError, UnsupportedError
from treewy.hf import HFMTPHead
from treewy.hf.checkpoint import load_mtp_weights
from treewy.packed import pack
from treewy.tree import DraftTree

TEXT = [5, 80, 33, 7, 7, 91, 60, 2, 44, 12, 120, 3]
SHAPES = [DraftTree.chain(3), DraftTree.from_widths([2, 2, 1]), DraftTree([-1, 0, 0, 0, 3])]
GATE = "mtp.layers.0.mlp.experts.3.gate_proj.weight"


def fused_weights(name: str) -> dict[str, torch.Tensor]:
    """Return the head's tensors as they were made, before any layout."""
    weights = family_weights(LAYOUTS[name].text, 0)
    return {key: tensor for key, tensor in weights.items() if key.startswith("mtp.")}


def oracle_of(name: str, model: PreTrainedModel) -> MTPOracle:
    kind = KINDS[LAYOUTS[name].text["model_type"]]
    axes = () if name.startswith("next") else (3,)
    return MTPOracle(model, fused_weights(name), kind.layer, kind.norm, axes)


def run_chain(head: HFMTPHead, hidden: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Run the text through the head as one chain, behind `start` rows committed before it."""
    pool = CachePool(head.layer_specs(), 1, get_policy("reconstruct"), dtype=head.dtype)
    slot = pool.allocate()
    outputs = []
    for rows in (range(start), range(start, len(TEXT) - 1)):
        if not rows:
            continue
        step = pool.begin(pack([DraftTree.chain(len(rows) - 1)]), [slot])
        tokens = torch.tensor([TEXT[row + 1] for row in rows])
        outputs.append(head.forward(tokens, hidden[rows.start : rows.stop], step.positions, step))
        pool.commit(step.pending(), [range(len(rows))])
    return torch.cat(outputs)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_a_chain_is_transformers_layer(families: Callable, name: str) -> None:
    """From the checkpoint's own tensors, whatever their layout: a mixture of experts, gated attention, partial rope."""
    folder, model = families(name)
    head, hidden = HFMTPHead(model, load_mtp_weights(folder)), forward(model, TEXT[:-1]).hidden
    want = oracle_of(name, model).chain(TEXT[1:], hidden)
    for start in (0, 4):
        assert relative_error(run_chain(head, hidden, start), want) < HF_LOGITS
    assert head.layer_specs() == [AttentionSpec(2, 16)]
    assert hasattr(head.module.layers[0].mlp, "shared_expert")


@pytest.mark.parametrize("name", ["moe", "next"])
def test_trees_equal_the_naive_growth(families: Callable, name: str) -> None:
    """A batch of three shapes: the tokens are the oracle's top-k, path by path."""
    folder, model = families(name)
    drafter = MTPDrafter(HFMTPHead(model, load_mtp_weights(folder)), len(SHAPES), poison=True)
    hidden = forward(model, TEXT[:-1]).hidden
    for slot in range(len(SHAPES)):
        drafter.allocate(slot)
        drafter.observe([Committed(slot, hidden, TEXT[1:], TEXT[0])])
    drafts = drafter.propose([Root(slot, TEXT[-1], shape) for slot, shape in enumerate(SHAPES)])
    for shape, (tree, _) in zip(SHAPES, drafts, strict=True):
        want = oracle_of(name, model).propose(TEXT, hidden, shape)
        assert (tree.parents, tree.tokens) == (want.parents, want.tokens)


@pytest.mark.parametrize(("fused", "single"), [("moe", "moe-experts"), ("next-fused", "next")])
def test_both_layouts_are_one_head(families: Callable, fused: str, single: str) -> None:
    """Bit for bit, tensors and outputs."""
    heads = [HFMTPHead(families(name)[1], load_mtp_weights(families(name)[0])) for name in (fused, single)]
    states = [head.module.state_dict() for head in heads]
    assert states[0].keys() == states[1].keys() == {name.removeprefix("mtp.") for name in fused_weights(fused)}
    for key, tensor in fused_weights(fused).items():
        assert all(torch.equal(state[key.removeprefix("mtp.")], tensor) for state in states)
    hidden = forward(families(fused)[1], TEXT[:-1]).hidden
    assert torch.equal(run_chain(heads[0], hidden), run_chain(heads[1], hidden))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(GATE), r"experts\.3\.gate_proj\.weight should be \(24, 64\) and is absent"),
        (
            lambda w: w.update({GATE.replace(".3.", ".6."): torch.zeros(24, 64)}),
            r"experts\.6\.gate_proj\.weight should be absent and is \(24, 64\)",
        ),
        (
            lambda w: w.update({GATE: torch.zeros(64, 24)}),
            r"experts\.3\.gate_proj\.weight should be \(24, 64\) and is \(64, 24\)",
        ),
        (
            lambda w: w.update({"mtp.layers.0.mlp.experts.down_proj": torch.zeros(6, 64, 24)}),
            r"experts\.down_proj should be absent and is \(6, 64, 24\)",
        ),
        (lambda w: w.pop("mtp.layers.0.mlp.gate.weight"), r"mlp\.gate\.weight should be \(6, 64\) and is absent"),
        (
            lambda w: w.pop("mtp.layers.0.mlp.shared_expert_gate.weight"),
            r"shared_expert_gate\.weight should be \(1, 64\) and is absent",
        ),
    ],
)
def test_a_head_that_does_not_fit(families: Callable, change: Callable, message: str) -> None:
    """One expert's tensor missing, surplus or misshapen is named as the checkpoint names it; so are mixed layouts."""
    changed = split_experts(fused_weights("moe"))
    change(changed)
    with pytest.raises(RequestError, match=message):
        HFMTPHead(families("moe")[1], changed)


def test_a_fused_head_that_does_not_fit(families: Callable) -> None:
    changed = fused_weights("moe")
    changed["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(6, 64, 48)
    with pytest.raises(RequestError, match=r"gate_up_proj should be \(6, 48, 64\) and is \(6, 64, 48\)"):
        HFMTPHead(families("moe")[1], changed)


def test_olmo_has_no_head(families: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Said by type, on every way to a drafter, whatever the caller hands over; without drafts it serves."""
    folder, model = families("olmo")
    said = r"qwen3_5_text, qwen3_5_moe_text, qwen3_next; 'olmo_hybrid' has none.*draft 'none'"
    with pytest.raises(UnsupportedError, match=said):
        treewy.load(folder)
    with pytest.raises(UnsupportedError, match=said):
        treewy.generate(model, torch.tensor([[1, 2]]), checkpoint=families("moe")[0])
    unnamed = copy.deepcopy(model)
    unnamed.config.name_or_path = ""
    with pytest.raises(UnsupportedError, match=said):
        treewy.generate(unnamed, torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedError, match=said):
        HFMTPHead(model, fused_weights("moe"))
    assert main(["generate", "t1", "--model", str(folder)]) != 0
    error = capsys.readouterr().err
    assert "'olmo_hybrid' has none" in error
