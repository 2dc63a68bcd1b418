"""From a budget to a shape."""

import pytest

from treewy.draft.shape import Budget, cut_to_depth, in_level_order, most_children, parse_shape
from treewy.errors import RequestError
from treewy.tree import DraftTree


def test_shapes() -> None:
    assert parse_shape().parents == (-1, 0, 1, 2)
    assert parse_shape(chain=0).parents == (-1,)
    assert parse_shape(chain=2).parents == (-1, 0, 1)
    assert parse_shape(tree="3,3,3").num_rows == 40
    assert parse_shape(tree="2, 1").parents == (-1, 0, 0, 1, 2)


def test_budgets() -> None:
    assert parse_shape(tree="best:16") == Budget(16)
    assert parse_shape(tree="best:16x5") == Budget(16, 5)
    assert parse_shape(tree="best:256x0x2") == Budget(num_rows=256, max_depth=0, max_children=2)
    with pytest.raises(RequestError, match="at least 0; got -1"):
        Budget(4, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "3", "chain": 3}, "Only one of tree and chain"),
        ({"chain": -1}, "0 to 4095 drafts; got -1"),
        ({"tree": ""}, "as in 3,3,3, and at most 4096 rows in all; got ''"),
        ({"tree": "3,,3"}, "as in 3,3,3"),
        ({"tree": "3,0"}, "as in 3,3,3"),
        ({"tree": "3;3"}, "as in 3,3,3"),
        ({"tree": "-1"}, "as in 3,3,3"),
        ({"tree": "best"}, "or a budget of rows, as in best:16"),
        ({"tree": "best:"}, "joined by x.* got 'best:'"),
        ({"tree": "best:16x"}, "joined by x"),
        ({"tree": "best:16x4x3x2"}, "joined by x"),
        ({"tree": "best:16,4"}, "joined by x"),
        ({"tree": "best:-1"}, "joined by x"),
        ({"tree": "best:²"}, "joined by x"),
        ({"tree": "best:0"}, "1 to 256 rows, root included; got 0"),
        ({"tree": "best:257"}, "1 to 256 rows, root included; got 257"),
        ({"tree": "best:16x4x0"}, "at least 1 child per row; got 0"),
        ({"tree": "best:16", "chain": 3}, "Only one of tree and chain"),
    ],
)
def test_bad_shapes(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_shape(**options)


def test_cut_to_depth() -> None:
    tree = DraftTree([-1, 0, 0, 1, 1, 3])
    assert cut_to_depth(tree, 9) is tree
    assert cut_to_depth(tree, 3) is tree
    assert cut_to_depth(tree, 2).parents == (-1, 0, 0, 1, 1)
    assert cut_to_depth(tree, 1).parents == (-1, 0, 0)
    assert cut_to_depth(tree, 0).parents == (-1,)


def test_a_budget_beside_a_shape() -> None:
    """What the engine asks of either: its depth cut, its rows in level order, its most children."""
    budget = Budget(9, 4, 3)
    assert cut_to_depth(budget, 4) is budget
    assert cut_to_depth(budget, 2) == Budget(9, 2, 3)
    assert in_level_order(budget) is budget
    assert in_level_order(DraftTree([-1, 0, 1, 0])).parents == (-1, 0, 0, 1)
    assert (most_children(budget), most_children(DraftTree([-1, 0, 0, 0, 3])), most_children(DraftTree([-1]))) == (
        3,
        3,
        0,
    )
