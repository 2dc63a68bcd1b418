"""Options: what is read, what is refused, and what a tree of widths has."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from treewy import DraftTree
from treewy.errors import RequestError
from treewy.vllm_plugin.options import MAX_ROWS, Options, num_drafts, options_of, parse


@pytest.mark.parametrize("config", [{}, {"other": 1}, {"treewy": None}, {"treewy": {}}, None, object()])
def test_without_options_nothing_changes(config: Any) -> None:
    assert parse(config) == Options()
    assert not Options().active


def test_everything_is_read() -> None:
    section = {"mamba_state_commit": "ring", "draft_tree_widths": [2, 2], "check_every": 5, "ring_capacity": 8}
    options = options_of(SimpleNamespace(additional_config={"treewy": section, "other": 1}))
    assert options == Options("ring", (2, 2), 5, 8)
    assert options.active
    assert parse({"treewy": {"mamba_state_commit": "reconstruct", "draft_tree_widths": None}}) == Options("reconstruct")
    assert not parse({"treewy": {"mamba_state_commit": "store_all", "check_every": 1}}).active


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([1], "additional_config['treewy'] must be a JSON object of options; got [1]. Use {\"treewy\": {"),
        (
            {"mamba_commit": "ring"},
            "must be among mamba_state_commit, draft_tree_widths, check_every, ring_capacity; got",
        ),
        ({"mamba_state_commit": "rings"}, "must be one of store_all, reconstruct, ring; got 'rings'. Use one."),
        ({"mamba_state_commit": 1}, "must be one of store_all, reconstruct, ring; got 1. Use one."),
        ({"mamba_state_commit": None}, "must be one of store_all, reconstruct, ring; got None. Use one."),
        ({"mamba_state_commit": ["ring"]}, "must be one of store_all, reconstruct, ring; got ['ring']. Use one."),
        ({"check_every": -1}, "check_every must be an integer of at least 0; got -1. Use 0 to check nothing."),
        ({"check_every": True}, "check_every must be an integer of at least 0; got True."),
        ({"check_every": 1.5}, "check_every must be an integer of at least 0; got 1.5."),
        ({"ring_capacity": 0}, "ring_capacity must be an integer from 1 to 128; got 0. Use 16, say."),
        ({"ring_capacity": 129}, "ring_capacity must be an integer from 1 to 128; got 129."),
        (
            {"draft_tree_widths": "3,3"},
            "draft_tree_widths must be positive integers, the children of a row at each level",
        ),
        (
            {"draft_tree_widths": []},
            "must be positive integers, the children of a row at each level, as in [3, 3, 3]; got [].",
        ),
        ({"draft_tree_widths": [3, 0]}, "got [3, 0]. Leave it out to draft a chain."),
        ({"draft_tree_widths": [3, 1.0]}, "got [3, 1.0]."),
        ({"draft_tree_widths": 3}, "got 3. Leave it out to draft a chain."),
        ({"draft_tree_widths": [True]}, "got [True]."),
        ({"draft_tree_widths": [3, 3]}, "needs a commit policy that rebuilds one state of a tree; got [3, 3] and"),
    ],
)
def test_bad_options_are_refused(section: Any, message: str) -> None:
    """Fault L09: by name, before anything runs."""
    with pytest.raises(RequestError, match=re.escape(message)):
        parse({"treewy": section})


@pytest.mark.parametrize(
    "widths", [(3, 3, 3), (1,), (1, 1, 1), (2, 2, 2), (5, 1, 2), (1,) * (MAX_ROWS - 1), (MAX_ROWS - 1,)]
)
def test_drafts_of_a_tree(widths: tuple[int, ...]) -> None:
    """As many as the tree of these widths has, and as deep; a chain is as deep as it is long."""
    tree, options = DraftTree.from_widths(widths), Options("reconstruct", widths)
    drafts = len(tree.parents) - 1
    assert num_drafts(widths) == options.num_tree_drafts == drafts
    assert options.longest_path(drafts) == options.kept_rows(drafts + 1) == 1 + tree.max_depth
    assert Options("reconstruct").num_tree_drafts is None
    assert Options("reconstruct").longest_path(drafts) == Options("reconstruct").kept_rows(drafts + 1) == 1 + drafts
    assert Options("ring", ring_capacity=7).kept_rows(4) == 7


@pytest.mark.parametrize("widths", [(MAX_ROWS,), (1,) * MAX_ROWS, (64, 1), (10, 12), (10**9,) * 50, (2,) * 6 + (1,)])
def test_a_tree_of_too_many_rows_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_ROWS} rows, root included; draft_tree_widths .* has more"):
        Options("reconstruct", widths)


def test_the_largest_tree_is_accepted() -> None:
    assert Options("reconstruct", (2,) * 6).num_tree_drafts == 126
