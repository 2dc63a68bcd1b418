"""From a budget to a shape."""

import pytest

from treewy.draft.shape import cut_to_depth, parse_shape
from treewy.errors import RequestError
from treewy.tree import DraftTree


def test_shapes() -> None:
    assert parse_shape().parents == (-1, 0, 1, 2)
    assert parse_shape(chain=0).parents == (-1,)
    assert parse_shape(chain=2).parents == (-1, 0, 1)
    assert parse_shape(tree="3,3,3").num_rows == 40
    assert parse_shape(tree="2, 1").parents == (-1, 0, 0, 1, 2)


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
