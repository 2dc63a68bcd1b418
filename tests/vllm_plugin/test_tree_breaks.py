"""Ways to break draft trees that were found by reading vLLM, and what keeps each from happening."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treewy.errors import RequestError, UnsupportedError
from treewy.tree import DraftTree
from treewy.vllm_plugin import facts, layer, tree_attention, tree_config
from treewy.vllm_plugin.options import Options
from treewy.vllm_plugin.refusals import check_tree_size, refuse
from treewy.vllm_plugin.synthetic import Synthetic
from treewy.vllm_plugin.tree_drafter import Levels, _check_attention
from vllm_plugin.stand_in import config

WIDTHS = (2, 2, 2)
TREE = Options("reconstruct", WIDTHS)


def engine(platform: str, *, requests: int, tokens: int, monkeypatch: pytest.MonkeyPatch, **attention: Any) -> Any:
    """Return a configuration with an attention config and a scheduler, for `prepare`, on a platform."""
    monkeypatch.setattr(tree_config.compat, "platform", lambda: platform)
    monkeypatch.setattr(
        tree_config.compat, "names", lambda: SimpleNamespace(AttentionBackendEnum=SimpleNamespace(CUSTOM="ours"))
    )
    monkeypatch.setattr(tree_attention, "register", lambda vllm, *, on_cpu: None)
    whole = config()
    whole.scheduler_config = SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens)
    whole.attention_config = SimpleNamespace(**{"backend": None, "backend_per_kind": {}} | attention)
    return whole


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"model__return_sampling_mask": True}, "return_sampling_mask is on. Leave it out"),
        (
            {"speculative__attention_backend": SimpleNamespace(name="FLASH_ATTN")},
            "attention_backend FLASH_ATTN and kv_cache_dtype None. Leave both out",
        ),
        ({"model__enable_return_routed_experts": True}, "enable_return_routed_experts is on. Leave it out"),
        (
            {"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)},
            "enable_return_routed_experts is on. Leave it out",
        ),
        ({"speculative__kv_cache_dtype": "fp8"}, "attention_backend None and kv_cache_dtype fp8. Leave both out"),
    ],
)
def test_what_only_trees_cannot_do(changes: dict[str, Any], given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 gives the drafter attention of its own if asked, and our sampler returns no masks.

    The experts of a step's first rows, which vLLM returns for as many tokens as were accepted, are not those of a path.
    """
    monkeypatch.setattr(facts, "platform", lambda: "cuda")
    drafts = {"speculative__num_speculative_tokens": 14}
    refuse(config(**changes), Options("reconstruct"))
    refuse(config(**drafts), TREE)
    with pytest.raises(UnsupportedError, match=given):
        refuse(config(**drafts, **changes), TREE)


def test_backends_by_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before the backend that is set for trees: rows of trees would be a chain's, and nothing would say so."""
    whole = engine(
        "cuda", requests=4, tokens=64, monkeypatch=monkeypatch, backend_per_kind={"full_attention": "FLASHINFER"}
    )
    with pytest.raises(
        UnsupportedError, match=r"backend_per_kind .*FLASHINFER.*Leave it out, or leave draft_tree_widths"
    ):
        tree_config.prepare(whole, TREE, asked=False)
    assert whole.attention_config.backend is None
    whole.attention_config.backend_per_kind = {}
    tree_config.prepare(whole, TREE, asked=False)
    assert whole.attention_config.backend == "ours"


def test_the_drafter_needs_room_without_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's drafter has buffers for one step's tokens; the last pass runs all levels but the last of every request."""
    tree_config.prepare(engine("cpu", requests=4, tokens=24, monkeypatch=monkeypatch), TREE, asked=False)
    tree_config.prepare(
        engine("cpu", requests=4, tokens=8, monkeypatch=monkeypatch), Options("ring", (7,)), asked=False
    )
    with pytest.raises(
        RequestError, match=r"4 x 6 rows; max_num_batched_tokens is 23\. Set it to 24 .*max_num_seqs to 3"
    ):
        tree_config.prepare(engine("cpu", requests=4, tokens=23, monkeypatch=monkeypatch), TREE, asked=False)


@pytest.mark.parametrize(
    ("tokens", "hint"), [(6, "Set it to 24 at least, or max_num_seqs to 1 at most."), (5, "Set it to 24 at least.")]
)
def test_no_advice_to_run_nothing(tokens: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step has no room for one request's levels, fewer requests do not help."""
    with pytest.raises(RequestError) as raised:
        tree_config.prepare(engine("cpu", requests=4, tokens=tokens, monkeypatch=monkeypatch), TREE, asked=False)
    assert str(raised.value).endswith(f"max_num_batched_tokens is {tokens}. {hint}")


def test_synthetic_paths_longer_than_the_tree_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded, as everything else is."""
    whole = engine("cpu", requests=4, tokens=64, monkeypatch=monkeypatch)
    whole.speculative_config.rejection_sample_method = "synthetic"
    whole.speculative_config.synthetic_acceptance_rates = [1.0, 0.5, 0.2, *[0.0] * 11]
    tree_config.prepare(whole, TREE, asked=False)
    whole.speculative_config.synthetic_acceptance_rates = [1.0, 0.5, 0.2, 0.1, *[0.0] * 10]
    with pytest.raises(RequestError, match=r"the tree has 3 levels\. Ask for 4 tokens at most"):
        tree_config.prepare(whole, TREE, asked=False)


def test_the_number_of_drafts_is_said_as_it_was_given() -> None:
    """A number in quotes is none."""
    with pytest.raises(RequestError, match=r"has 14, num_speculative_tokens is '14'"):
        check_tree_size(TREE, "14")


@pytest.mark.parametrize(
    ("sizes", "captured"),
    [([60], True), ([15, 46, 64], True), ([15, 30, 64], False), ([15, 46], False), ([128], False), ([60, 128], True)],
)
def test_sizes_of_graphs_are_rounded_to_whole_trees(
    sizes: list[int], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size above that of all requests' trees rounds to more requests than there are, and vLLM drops it."""
    whole = engine("cpu", requests=4, tokens=256, monkeypatch=monkeypatch)
    whole.compilation_config = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
    )
    if captured:
        tree_config.prepare(whole, TREE, asked=True)
        return
    with pytest.raises(
        RequestError, match=r"Full trees of all 4 requests .* of 60 rows; sizes are .* have 60 among them"
    ):
        tree_config.prepare(whole, TREE, asked=True)


def test_softmax_layers_that_know_of_no_trees_are_refused() -> None:
    """However they came to have another backend: their tokens would be wrong."""
    ours, gdn = SimpleNamespace(impl=SimpleNamespace(treewy_drafts=False)), SimpleNamespace()
    _check_attention({"model.3": ours, "model.0": gdn, "mtp.0": ours})
    with pytest.raises(
        UnsupportedError, match=r"all 2 softmax layers; 1 have another backend, mtp\.0 has SimpleNamespace"
    ):
        _check_attention({"model.3": ours, "model.0": gdn, "mtp.0": SimpleNamespace(impl=SimpleNamespace())})


@pytest.mark.parametrize(
    "make",
    [
        lambda tree: Levels(tree, 3, "cpu"),
        lambda tree: Synthetic(tree, [0.5] * 3, 50, "cpu"),
    ],
)
def test_deep_sleep_brings_tables_back(make: Callable[[DraftTree], Any]) -> None:
    """It takes what was made while a model was loaded; tables that nobody writes again must be among what it saves."""
    made = make(DraftTree.from_widths(WIDTHS))
    model = layer._Lasting({})
    model.add(made.lasting)
    saved = {buffer.data_ptr() for buffer in model.buffers()}
    held = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
    for tables in getattr(made, "_tables", ()):
        held += [part for part in tables if isinstance(part, torch.Tensor)]
    assert len(held) > 2
    assert {tensor.data_ptr() for tensor in held} == saved
