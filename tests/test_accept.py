"""Greedy acceptance: the definition of what a step delivers."""

import numpy as np
import pytest
import torch

from treewy.accept import Accepted, greedy, walk_choices
from treewy.errors import ShapeError
from treewy.tree import DraftTree

SCATTERED = DraftTree([-1, 0, 0, 0, 3], [7, 1, 2, 3, 4])


def one_hot(choices: list[int], vocab: int = 16) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).double()


@pytest.mark.parametrize(
    ("choices", "want"),
    [
        ([5, 6, 7, 8], Accepted([0, 1, 2, 3], [5, 6, 7, 8], is_bonus=True)),
        ([5, 6, 9, 8], Accepted([0, 1, 2], [5, 6, 9], is_bonus=False)),
        ([9, 6, 7, 8], Accepted([0], [9], is_bonus=False)),
    ],
)
def test_chain(choices: list[int], want: Accepted) -> None:
    """A chain is accepted up to its first wrong draft; the target's own token follows."""
    chain = DraftTree.chain(3).with_tokens([1, 5, 6, 7])
    assert greedy(chain, one_hot(choices)) == want


def test_root_alone() -> None:
    """A step without drafts delivers one token; nothing stood, nothing fell."""
    assert greedy(DraftTree([-1], [1]), one_hot([4])) == Accepted([0], [4], is_bonus=True)


@pytest.mark.parametrize(
    ("choices", "want"),
    [
        ([3, 0, 0, 4, 9], Accepted([0, 3, 4], [3, 4, 9], is_bonus=True)),
        ([2, 0, 11, 0, 0], Accepted([0, 2], [2, 11], is_bonus=True)),  # node 2 is a leaf
        ([3, 0, 0, 1, 9], Accepted([0, 3], [3, 1], is_bonus=False)),
        ([4, 0, 0, 4, 9], Accepted([0], [4], is_bonus=False)),  # 4 is drafted, but not below the root
    ],
)
def test_tree(choices: list[int], want: Accepted) -> None:
    """Fault G05: the path holds rows, not counts; three accepted rows of this tree end in node 4, not in row 2."""
    assert greedy(SCATTERED, one_hot(choices)) == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [16, 151_936])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype, vocab: int) -> None:
    """Fault F13: logits equal at ids 5 and 9 give 5, drafted or not, in every dtype and at any vocabulary size."""
    logits = torch.full((3, vocab), -1.0, dtype=dtype)
    logits[:, [5, 9, vocab - 1]] = 2.0
    chain = DraftTree.chain(2)
    assert greedy(chain.with_tokens([0, 5, 9]), logits) == Accepted([0, 1], [5, 5], is_bonus=False)
    assert greedy(chain.with_tokens([0, 9, 9]), logits) == Accepted([0], [5], is_bonus=False)


def test_of_twins_the_first_is_followed() -> None:
    """Siblings may hold one token; rows with one root path are one sequence, so the first of them will do."""
    twins = DraftTree([-1, 0, 0, 0, 1, 2], [0, 8, 8, 9, 4, 5])
    assert walk_choices(twins, [8, 4, 5, 0, 1, 1]) == Accepted([0, 1, 4], [8, 4, 1], is_bonus=True)
    assert walk_choices(twins, [8, 5, 5, 0, 1, 1]) == Accepted([0, 1], [8, 5], is_bonus=False)


def test_equals_a_plain_walk_by_child_lists() -> None:
    """Fault G13: 200 random trees, walked by parents here and by child and sibling lists in the test."""
    rng = np.random.default_rng(13)
    lengths = []
    for _ in range(200):
        size = int(rng.integers(1, 40))
        reach = int(rng.choice([1, 3, 40]))
        parents = [-1] + [int(rng.integers(max(0, row - reach), row)) for row in range(1, size)]
        tokens = rng.integers(0, 4, size).tolist()
        choices = rng.integers(0, 4, size).tolist()
        accepted = greedy(DraftTree(parents, tokens), one_hot(choices))
        path, delivered = by_child_lists(parents, tokens, choices)
        assert (accepted.path, accepted.tokens) == (path, delivered)
        assert accepted.is_bonus == (path[-1] not in parents)
        lengths.append(len(path))
    assert max(lengths) >= 4, "no tree accepted anything deep: the test shows little"


def by_child_lists(parents: list[int], tokens: list[int], choices: list[int]) -> tuple[list[int], list[int]]:
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for row in reversed(range(1, len(parents))):
        next_sibling[row], first_child[parents[row]] = first_child[parents[row]], row
    path, delivered, row = [], [], 0
    while row != -1:
        path.append(row)
        delivered.append(choices[row])
        row = first_child[row]
        while row != -1 and tokens[row] != delivered[-1]:
            row = next_sibling[row]
    return path, delivered


def test_path_and_tokens_are_of_one_length() -> None:
    """The state after `path` lacks the last token: as many rows are committed as tokens are delivered."""
    accepted = greedy(SCATTERED, one_hot([3, 0, 0, 4, 9]))
    assert len(accepted.path) == len(accepted.tokens)
    assert [SCATTERED.tokens[row] for row in accepted.path[1:]] == accepted.tokens[:-1]


def test_cut() -> None:
    """A cut outcome commits what it delivers, and its last token is no bonus."""
    accepted = Accepted([0, 3, 4], [3, 4, 9], is_bonus=True)
    assert accepted.cut(3) is accepted
    assert accepted.cut(9) is accepted
    assert accepted.cut(2) == Accepted([0, 3], [3, 4], is_bonus=False)
    assert accepted.cut(1) == Accepted([0], [3], is_bonus=False)


def test_a_bare_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="bare shape"):
        greedy(DraftTree.chain(2), one_hot([1, 2, 3]))


def test_logits_must_fit_the_tree() -> None:
    with pytest.raises(ShapeError, match="one row per tree row, 5; got 4"):
        greedy(SCATTERED, one_hot([1, 2, 3, 4]))
