"""DraftTree against slow, obvious definitions, and every way a tree can be malformed."""

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treewy.tree
from ops.problems import trees
from tolerances import EXACT
from treewy.errors import TreeError
from treewy.tree import DraftTree


def naive_path(parents, row):
    return [] if row < 0 else [*naive_path(parents, parents[row]), row]


@pytest.fixture(scope="module")
def unhooked():
    """The tree module without the tests' type checks: what a caller who passes wrong types meets."""
    spec = importlib.util.spec_from_file_location("unhooked_tree", Path(treewy.tree.__file__))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class TestTables:
    @given(trees(60))
    def test_paths_depths_ancestors_and_children_follow_the_parents(self, tree):
        paths = [naive_path(tree.parents, row) for row in range(tree.num_rows)]
        assert [tree.path(row) for row in range(tree.num_rows)] == paths
        assert tree.depth.tolist() == [len(path) - 1 for path in paths]
        assert tree.max_depth == max(map(len, paths)) - 1
        assert tree.ancestors.tolist() == [[i in path for i in range(tree.num_rows)] for path in paths]
        for row in range(tree.num_rows):
            assert tree.children(row) == tuple(i for i, parent in enumerate(tree.parents) if parent == row)
        assert tree.is_chain == (tree.max_depth == tree.num_rows - 1)
        assert tree.num_drafts == tree.num_rows - 1

    @pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 128, 200, 255, 256])
    @pytest.mark.parametrize("reach", [1, 3, 256])
    def test_ancestor_words_hold_the_ancestor_bits(self, num_rows, reach):
        rng = np.random.default_rng(num_rows * reach)
        tree = DraftTree([-1] + [int(rng.integers(max(0, row - reach), row)) for row in range(1, num_rows)])
        words = tree.ancestor_words
        assert words.dtype == np.uint64
        assert words.shape == (num_rows, -(-num_rows // 64))
        bits = [[int(words[t, i // 64]) >> (i % 64) & 1 for i in range(words.shape[1] * 64)] for t in range(num_rows)]
        assert np.array_equal(np.array(bits)[:, :num_rows], tree.ancestors)
        assert not np.array(bits)[:, num_rows:].any()

    def test_tables_are_shared_and_read_only(self):
        tree = DraftTree.chain(3)
        assert tree.depth is DraftTree.chain(3).depth
        for table in (tree.depth, tree.ancestors, tree.ancestor_words):
            with pytest.raises(ValueError, match="read-only"):
                table[0] = 1

    def test_fault_g03_depth_of_a_child_follows_its_parent(self):
        """Fault G03: the positions of a new level ignored which parents had been picked."""
        tree = DraftTree([-1, 0, 0, 2, 2, 4])
        assert tree.depth.tolist() == [0, 1, 1, 2, 2, 3]

    @pytest.mark.parametrize("width", [33, 64, 200])
    def test_fault_g08_any_number_of_siblings(self, width):
        """Fault G08: more than 32 siblings overran a fixed table."""
        star = DraftTree.from_widths([width])
        assert star.children(0) == tuple(range(1, width + 1))
        assert star.max_depth == 1
        assert star.path(width) == [0, width]
        assert star.ancestors.sum() == 2 * width + 1
        assert len(star.best_subtree(np.linspace(0, 1, width + 1).tolist(), width)) == width

    @pytest.mark.parametrize("row", [-1, 5])
    def test_a_path_must_end_in_the_tree(self, row):
        with pytest.raises(TreeError, match=f"row {row} of 5"):
            DraftTree([-1, 0, 0, 0, 3]).path(row)


class TestBuilders:
    def test_from_widths_is_breadth_first(self):
        tree = DraftTree.from_widths([3, 2])
        assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
        assert DraftTree.from_widths([3, 3, 3]).num_rows == 40
        assert tree.breadth_first() == tree

    @pytest.mark.parametrize("num_drafts", [0, 1, 5])
    def test_chain(self, num_drafts):
        tree = DraftTree.chain(num_drafts)
        assert tree.is_chain
        assert (tree.num_drafts, tree.max_depth) == (num_drafts, num_drafts)

    def test_values_compare_hash_and_print(self):
        tree = DraftTree([-1, 0], [7, 8])
        assert tree == DraftTree.chain(1).with_tokens([7, 8])
        assert tree != DraftTree.chain(1)
        assert len({tree, DraftTree([-1, 0], [7, 8]), DraftTree.chain(1)}) == 2
        assert eval(repr(tree)) == tree

    def test_numpy_integers_are_integers(self):
        tree = DraftTree(list(np.array([-1, 0, 1])), list(np.array([4, 5, 6])))
        assert tree == DraftTree([-1, 0, 1], [4, 5, 6])
        assert all(type(value) is int for value in tree.parents + tree.tokens)


class TestSelection:
    @given(trees(40))
    def test_breadth_first_sorts_by_depth_and_keeps_paths(self, tree):
        tree = tree.with_tokens(range(100, 100 + tree.num_rows))
        sorted_tree = tree.breadth_first()
        assert sorted(sorted_tree.depth.tolist()) == sorted_tree.depth.tolist() == sorted(tree.depth.tolist())

        def token_paths(of):
            return sorted(tuple(of.tokens[node] for node in of.path(row)) for row in range(of.num_rows))

        assert token_paths(sorted_tree) == token_paths(tree)

    @given(trees(30), st.data())
    def test_every_prefix_is_a_tree(self, tree, data):
        tree = tree.with_tokens(range(tree.num_rows))
        size = data.draw(st.integers(1, tree.num_rows))
        assert tree.prefix(size) == DraftTree(tree.parents[:size], range(size))

    @given(trees(30), st.data())
    def test_select_renumbers_and_keeps_tokens(self, tree, data):
        tree = tree.with_tokens(range(100, 100 + tree.num_rows))
        leaf = data.draw(st.integers(0, tree.num_rows - 1))
        chosen = tree.select(tree.path(leaf))
        assert chosen.is_chain
        assert list(chosen.tokens) == [100 + row for row in tree.path(leaf)]

    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ([0, 4], "row 4 has parent 3"),
            ([0, 4, 3], "row 4 has parent 3"),
            ([1], "row 1 has parent 0"),
            ([0, 1, 1], "place 2 has row 1"),
            ([0, -1], "place 1 has row -1"),
            ([0, 5], "place 1 has row 5"),
            ([], "at least its root"),
        ],
    )
    def test_a_selection_must_be_ancestor_closed(self, rows, reason):
        with pytest.raises(TreeError, match=reason):
            DraftTree([-1, 0, 0, 0, 3]).select(rows)

    @pytest.mark.parametrize("num_rows", [-1, 0, 6])
    def test_a_prefix_must_fit(self, num_rows):
        with pytest.raises(TreeError, match=f"got {num_rows}"):
            DraftTree([-1, 0, 0, 0, 3]).prefix(num_rows)


class TestBestSubtree:
    scores = st.floats(-2, 2) | st.integers(-2, 2)

    @given(trees(10), st.data())
    def test_equals_brute_force(self, tree, data):
        scores = data.draw(st.lists(self.scores, min_size=tree.num_rows, max_size=tree.num_rows))
        budget = data.draw(st.integers(1, tree.num_rows + 2))
        kept = tree.best_subtree(scores, budget)
        assert kept == sorted(set(kept))
        assert len(kept) <= budget
        tree.select(kept)  # ancestor-closed, root in it
        closed = (
            (0, *rest)
            for size in range(min(budget, tree.num_rows))
            for rest in itertools.combinations(range(1, tree.num_rows), size)
            if all(tree.parents[row] in (0, *rest) for row in rest)
        )
        best = max(sum(scores[row] for row in rows) for rows in closed)
        assert sum(scores[row] for row in kept) == pytest.approx(best, abs=EXACT)

    def test_keeps_the_root_whatever_it_scores(self):
        assert DraftTree.chain(2).best_subtree([-5.0, -1.0, -1.0], 3) == [0]
        assert DraftTree.chain(2).best_subtree([-5.0, -1.0, 3.0], 3) == [0, 1, 2]

    def test_passes_through_a_bad_row_only_for_a_better_one_below(self):
        tree = DraftTree([-1, 0, 0, 2])
        assert tree.best_subtree([0.0, 1.0, -1.0, 1.5], 3) == [0, 1]
        assert tree.best_subtree([0.0, 1.0, -1.0, 2.5], 3) == [0, 2, 3]

    def test_a_row_without_a_score_is_never_kept(self):
        assert DraftTree([-1, 0, 0]).best_subtree([0.0, -np.inf, 1.0], 3) == [0, 2]

    @pytest.mark.parametrize(
        ("scores", "budget", "reason"),
        [([1.0], 1, "1 scores for 3 rows"), ([1.0] * 3, 0, "got 0"), ([1.0, np.nan, 1.0], 2, "number")],
    )
    def test_refuses_what_has_no_answer(self, scores, budget, reason):
        with pytest.raises(TreeError, match=reason):
            DraftTree.chain(2).best_subtree(scores, budget)


class TestMalformed:
    @pytest.mark.parametrize(
        ("parents", "reason"),
        [
            pytest.param([], "at least its root", id="empty"),
            pytest.param([0, 0], "Row 0 must be the root.*parent 0", id="no root"),
            pytest.param([-1, -1], "node 1 has parent -1", id="second root"),
            pytest.param([-1, 0, -7], "node 2 has parent -7", id="negative parent"),
            pytest.param([-1, 0, 3, 2], "precede.*node 2 has parent 3", id="cycle"),
            pytest.param([-1, 2, 0], "precede.*node 1 has parent 2", id="forward parent"),
            pytest.param([-1, 0, 2], "precede.*node 2 has parent 2", id="self parent"),
            pytest.param([-1, 0, 99], "precede.*node 2 has parent 99", id="parent out of range"),
        ],
    )
    def test_parents(self, parents, reason):
        with pytest.raises(TreeError, match=reason):
            DraftTree(parents)

    @pytest.mark.parametrize(
        ("parents", "reason"),
        [
            ([-1, False], "node 1 has parent False"),
            ([-1, 0, True], "node 2 has parent True"),
            ([-1, 0.0], "node 1 has parent 0.0"),
            ([-1.0], "node 0 has parent -1.0"),
            ([-1, None], "node 1 has parent None"),
            ([-1, "0"], "node 1 has parent '0'"),
            ([-1, np.float64(0)], "node 1 has parent"),
            ([-1, np.bool_(False)], "node 1 has parent"),
        ],
    )
    def test_parents_must_be_integers(self, unhooked, parents, reason):
        with pytest.raises(TreeError, match=reason):
            unhooked.DraftTree(parents)

    @pytest.mark.parametrize(
        ("tokens", "reason"),
        [([1], "1 tokens for 2 rows"), ([1, 2, 3], "3 tokens for 2 rows"), ([5, -2], "node 1 has token -2")],
    )
    def test_tokens(self, tokens, reason):
        with pytest.raises(TreeError, match=reason):
            DraftTree([-1, 0], tokens)
        with pytest.raises(TreeError, match=reason):
            DraftTree([-1, 0]).with_tokens(tokens)

    @pytest.mark.parametrize("token", [1.7, True, None, "3"])
    def test_tokens_must_be_integers(self, unhooked, token):
        with pytest.raises(TreeError, match="node 1 has token"):
            unhooked.DraftTree([-1, 0], [5, token])

    def test_fault_h16_a_placeholder_is_not_a_token(self):
        """Fault H16: the filler -1 in a draft row reached the sampler and read the last vocabulary row."""
        with pytest.raises(TreeError, match="node 1 has token -1"):
            DraftTree([-1, 0, 1], [12, -1, -1])

    @pytest.mark.parametrize(
        ("widths", "reason"),
        [([3, 0], "level 2 has 0"), ([-1], "level 1 has -1"), ([2, 2, -3], "level 3 has -3")],
    )
    def test_widths(self, widths, reason):
        with pytest.raises(TreeError, match=reason):
            DraftTree.from_widths(widths)

    @pytest.mark.parametrize("width", [True, 1.5, "2"])
    def test_widths_must_be_integers(self, unhooked, width):
        with pytest.raises(TreeError, match="level 1 has"):
            unhooked.DraftTree.from_widths([width])

    def test_widths_must_be_a_list(self, unhooked):
        with pytest.raises(TreeError, match=r"must be a list, one per level; got 3\. Write \[3, 3\]"):
            unhooked.DraftTree.from_widths(3)

    def test_a_chain_is_never_negative(self):
        with pytest.raises(TreeError, match="got -1"):
            DraftTree.chain(-1)
