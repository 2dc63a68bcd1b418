"""Acceptance of trees: along the target's own tokens, for who may accept, and by chance where speed alone is measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.errors import RequestError
from treewy.tree import DraftTree
from treewy.vllm_plugin import tree_sampler
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.step import Drafted, Step
from treewy.vllm_plugin.synthetic import Synthetic, depth_rates
from treewy.vllm_plugin.tree_sampler import chunks, needs_root_alone, sampler_class, walk
from treewy.vllm_plugin.trees import Trees
from vllm_plugin.fakes import compat
from vllm_plugin.rows import sizes
from vllm_plugin.window_steps import tables_of

TREE = DraftTree((-1, 0, 0, 2, 2, 4))
VOCABULARY = 12
NONE = -1


class RejectionSampler:
    """vLLM's."""

    def __init__(self, sampler: Any, speculative: Any, device: Any) -> None:
        self.sampler = sampler


class Scene:
    """A batch with logits, and the sampler of an engine.

    Args:
        rows: Rows of each request of the batch.
        prompts: Places of the batch that draft nothing: one row of theirs has logits.
        unfinished: Those of them that have more to come.
        mode: What log-probabilities are of.
        wanted: How many of them.
        named: How many tokens each request of the engine names, whose log-probabilities it wants.
    """

    def __init__(
        self,
        rows: list[int],
        prompts: tuple[int, ...] = (),
        *,
        unfinished: tuple[int, ...] = (),
        mode: str = "raw_logprobs",
        wanted: int = NONE,
        named: dict[int, int] | None = None,
        seed: int = 0,
        **speculative: Any,
    ) -> None:
        self.rows, self.prompts = rows, prompts
        self.random, self.asked = np.random.default_rng(seed), list[Any]()
        count, self.mode = len(rows), mode
        self.requests = np.array([5, 2, 7, 0, 3][:count])
        self.logits_rows = [1 if place in prompts else size for place, size in enumerate(rows)]
        starts = np.concatenate([[0], np.cumsum(rows)])
        bounds = np.concatenate([[0], np.cumsum(self.logits_rows)])
        self.starts = bounds
        local = [row for size in self.logits_rows for row in range(size)]
        indices = [
            starts[place] + (rows[place] - 1 if place in prompts else row)
            for place, size in enumerate(self.logits_rows)
            for row in range(size)
        ]
        before = np.array([20 + place for place in range(count)])
        depth = [
            before[place] + (row if place in prompts else TREE.depth[row])
            for place, size in enumerate(rows)
            for row in range(size)
        ]
        self.batch = SimpleNamespace(
            positions=torch.tensor(depth),
            logits_indices=torch.tensor(indices),
            expanded_idx_mapping=torch.tensor(np.repeat(self.requests, self.logits_rows), dtype=torch.int32),
            expanded_local_pos=torch.tensor(local, dtype=torch.int32),
            input_ids=torch.zeros(int(starts[-1]), dtype=torch.int32),
            idx_mapping=torch.tensor(self.requests, dtype=torch.int32),
            idx_mapping_np=self.requests,
            cu_num_logits=torch.tensor(bounds, dtype=torch.int32),
            cu_num_logits_np=bounds.astype(np.int32),
            seq_lens=torch.tensor(before + rows, dtype=torch.int32),
        )
        prefill = torch.full((8,), 10, dtype=torch.int32)
        for place in prompts:
            prefill[self.requests[place]] = before[place] + rows[place] + (5 if place in unfinished else 0)
        self.logits = torch.from_numpy(self.random.normal(size=(len(indices), VOCABULARY)).astype(np.float32))
        self.bias = torch.from_numpy(self.random.normal(size=(8, VOCABULARY)).astype(np.float32))
        # What the target gives after each row, once a request's own parameters have had their say.
        self.processed = self.logits + self.bias[self.batch.expanded_idx_mapping.long()]
        self.choices = self.processed.argmax(-1)
        self._draft()
        self.sampler = SimpleNamespace(
            compute_nans=True,
            logprobs_mode=mode,
            use_fp64_gumbel=False,
            req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=prefill)),
            sampling_states=SimpleNamespace(
                max_num_logprobs=lambda requests: wanted,
                temperature=SimpleNamespace(gpu=torch.zeros(8)),
                seeds=SimpleNamespace(gpu=torch.arange(8)),
            ),
        )
        numbers = np.array([(named or {}).get(request, 0) for request in range(8)])
        self.sampler.logprob_token_ids_state = SimpleNamespace(
            max_num_token_ids=lambda requests: int(numbers[requests].max(initial=0))
        )
        memory = Memory(sizes(4, step_rows=TREE.num_rows, max_path=4), "cpu")
        step, trees = Step(memory, "eager", TREE), Trees(TREE, 8, "cpu")
        drafted = [place for place in range(count) if place not in prompts]
        step.begin(
            Drafted(
                np.array(drafted),
                self.requests[drafted].astype(np.int32),
                np.array(rows, np.int32)[drafted],
            ),
            len(drafted),
            sum(rows[place] for place in drafted),
        )
        self.shared = SimpleNamespace(memory=memory, step=step, trees=trees)
        options = {"rejection_sample_method": "standard"} | speculative
        self.made = sampler_class(self._vllm())(self.sampler, SimpleNamespace(**options), self.shared, VOCABULARY)

    def _draft(self) -> None:
        """Give most rows a child with the target's token, at any place among its siblings."""
        for place, size in enumerate(self.logits_rows):
            start = self.starts[place]
            for row in range(size):
                children = [child for child in TREE.children(row) if child < size]
                right = int(self.choices[start + row])
                others = [token for token in range(VOCABULARY) if token != right]
                tokens = self.random.permutation(others)[: len(children)]
                if children and self.random.random() < 0.75:
                    tokens[self.random.integers(len(children))] = right
                for child, token in zip(children, tokens, strict=True):
                    self.batch.input_ids[self.batch.logits_indices[start + child]] = int(token)

    def _vllm(self) -> Any:
        def processed_logits(sampler, logits, batch, requests, rows, positions, drafts):
            assert sampler is self.sampler
            mapping = batch.expanded_idx_mapping[rows]
            # The same requests, three times over.
            assert torch.equal(mapping.unique_consecutive(), torch.tensor(batch.idx_mapping_np[requests]).int())
            assert torch.equal(positions, batch.positions[batch.logits_indices[rows]])
            self.asked.append((rows.start, rows.stop, drafts.tolist()))
            return logits + self.bias[mapping.long()]

        def sample(logits, requests, temperature, seeds, positions, use_fp64):
            assert len(logits) == len(requests) == len(positions)
            return logits.argmax(-1)

        def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
            more = seq_lens < prefill_len[idx_mapping.long()]
            counts = torch.where(more, 0, num_sampled)
            return counts, torch.where(more, 0, cu_num_logits.diff() - counts)

        def compute_topk_scores(logits, wanted, tokens, bounds, **others):
            assert wanted >= 0
            return SimpleNamespace(logits=logits, wanted=wanted, tokens=tokens, bounds=bounds, **others)

        return compat(
            RejectionSampler=RejectionSampler,
            get_num_nans=lambda logits: logits.isnan().sum(-1),
            NO_LOGPROBS=NONE,
            PROCESSED_LOGPROBS_MODES=("processed_logprobs", "processed_logits"),
            SamplerOutput=SimpleNamespace,
            processed_logits=processed_logits,
            sample=sample,
            get_num_sampled_and_rejected=get_num_sampled_and_rejected,
            compute_topk_scores=compute_topk_scores,
        )

    def run(self) -> Any:
        """Sample."""
        return self.made(self.logits, self.batch, "anything", "else")

    def walked(self, *, alone: tuple[int, ...] = ()) -> list[tuple[list[int], list[int]]]:
        """Return each request's tokens and path, followed by hand."""
        found = []
        for place, size in enumerate(self.logits_rows):
            start, row = self.starts[place], 0
            tokens, path = [int(self.choices[start])], [0]
            while place not in alone:
                right = [
                    child
                    for child in TREE.children(row)
                    if child < size and self.batch.input_ids[self.batch.logits_indices[start + child]] == tokens[-1]
                ]
                if not right:
                    break
                (row,) = right
                path.append(row)
                tokens.append(int(self.choices[start + row]))
            found.append((tokens, path))
        return found


def assert_accepted(scene: Scene, out: Any, want: list[tuple[list[int], list[int]]]) -> None:
    """Check tokens, counts and paths, and that nothing stands behind their ends."""
    assert scene.shared.trees.path is not None
    for place, (tokens, path) in enumerate(want):
        given = out.sampled_token_ids[place].tolist()
        assert given == tokens + [-1] * (len(given) - len(tokens))
        assert scene.shared.trees.path[place].tolist() == path + [0] * (len(given) - len(path))


SCENES = [
    ([6, 6, 6, 6], ()),
    ([6, 3, 1, 5], ()),
    ([6, 9, 6, 4], (1,)),
    ([7, 6, 2], (0,)),
    ([6, 6, 8], (2,)),
    ([5], (0,)),
]


@pytest.mark.parametrize(("rows", "prompts"), SCENES)
@pytest.mark.parametrize("seed", range(4))
def test_paths_are_the_targets_own(rows: list[int], prompts: tuple[int, ...], seed: int) -> None:
    """Faults G05, G13 and I14: the walk by hand, in whole trees, cut ones and prompts; a step is told the same path."""
    scene = Scene(rows, prompts, seed=seed)
    out, want = scene.run(), scene.walked()
    assert_accepted(scene, out, want)
    assert out.num_sampled.tolist() == [len(tokens) for tokens, _ in want]
    sizes_of = zip(scene.logits_rows, want, strict=True)
    assert out.num_rejected.tolist() == [size - len(tokens) for size, (tokens, _) in sizes_of]
    assert out.sampled_token_ids.dtype == torch.int64
    assert out.logprobs_tensors is None
    assert out.num_nans.tolist() == [0] * len(scene.logits)


def test_the_scenes_have_paths_of_every_length() -> None:
    """What is tested above is not that nothing is ever accepted."""
    found = {len(path) for seed in range(8) for _, path in Scene([6] * 5, seed=seed).walked()}
    assert found == {1, 2, 3, 4}


@pytest.mark.parametrize("most", [1, 6, 7, 12, 13, 10**6])
def test_chunks_change_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_sampler, "MAX_CHUNK_BYTES", 4 * VOCABULARY * most)
    scene = Scene([6, 3, 6, 1, 6], (3,), mode="processed_logits", wanted=2)
    out = scene.run()
    assert_accepted(scene, out, scene.walked())
    bounds = [(start, end) for start, end, _ in scene.asked]
    assert [start for start, _ in bounds] == [0, *[end for _, end in bounds][:-1]]
    assert bounds[-1][1] == len(scene.logits)
    assert all(end - start <= max(most, 6) for start, end in bounds)
    assert (len(bounds) == 1) == (most == 10**6)
    rows = (scene.batch.cu_num_logits[:-1, None] + scene.shared.trees.path).long().flatten()
    assert torch.equal(out.logprobs_tensors.logits, scene.processed[rows])


@pytest.mark.parametrize(
    ("sizes_of", "most", "want"),
    [
        ([6, 6, 6], 12, [(0, 2), (2, 3)]),
        ([6, 6, 6], 11, [(0, 1), (1, 2), (2, 3)]),
        ([6, 9, 1], 3, [(0, 1), (1, 2), (2, 3)]),
        ([1, 1, 9, 1, 1], 4, [(0, 2), (2, 3), (3, 5)]),
        ([6, 6], 100, [(0, 2)]),
        ([], 4, []),
    ],
)
def test_ranges_of_requests(sizes_of: list[int], most: int, want: list[tuple[int, int]]) -> None:
    assert chunks(np.concatenate([[0], np.cumsum(sizes_of)]).astype(np.int32), most) == want


def test_who_accepts_the_root_alone() -> None:
    """Fault H13: its drafts are not shown to anybody, so that none is taken or counted; the others go on."""
    scene = Scene([6] * 5, seed=3)
    places = tuple(place for place, (_, path) in enumerate(scene.walked()) if len(path) > 1)[:2]
    assert len(places) == 2
    scene.made.alone[scene.requests[list(places)]] = True
    out = scene.run()
    assert_accepted(scene, out, scene.walked(alone=places))
    ((_, _, drafts),) = scene.asked
    for place in range(5):
        own = drafts[6 * place : 6 * place + 6]
        assert (own == [-1] * 6) == (place in places)


def test_drafts_within_a_prompt_are_none() -> None:
    """Fault D06: vLLM pads the last token of a prompt to a draft's rows; whatever lies there is not accepted."""
    scene = Scene([6, 6], seed=5)
    assert [len(path) for _, path in scene.walked()] == [4, 2]
    scene.sampler.req_states.prefill_len.gpu[scene.requests[0]] = 21  # its root is the last of it
    out = scene.run()
    assert_accepted(scene, out, scene.walked(alone=(0,)))
    ((_, _, drafts),) = scene.asked
    assert drafts[1:6] == [-1] * 5
    assert drafts[0] == scene.batch.input_ids[0]


def test_more_of_a_prompt_samples_nothing() -> None:
    scene = Scene([6, 4], (1,), unfinished=(1,))
    out = scene.run()
    assert (out.num_sampled[1], out.num_rejected[1]) == (0, 0)
    assert out.num_sampled[0] == len(scene.walked()[0][0])


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_log_probabilities_are_those_of_the_path(mode: str) -> None:
    """Fault I09: of the row that gave each token, not of the rows that come first."""
    scene = Scene([6, 6, 4, 6], (2,), mode=mode, wanted=2, seed=7)
    out, want = scene.run(), scene.walked()
    assert any(path not in ([0], [0, 1]) for _, path in want)
    scores, width = out.logprobs_tensors, TREE.max_depth + 1
    source = scene.processed if mode.startswith("processed") else scene.logits
    for place, (tokens, path) in enumerate(want):
        rows = slice(place * width, place * width + len(path))
        assert torch.equal(scores.logits[rows], source[[scene.starts[place] + row for row in path]])
        assert scores.tokens[rows].tolist() == tokens
    assert scores.tokens.min() >= 0  # they are looked up
    assert scores.bounds == [width * place for place in range(5)]
    assert scores.wanted == 2
    assert scores.logits_mode == mode.endswith("logits")


@pytest.mark.parametrize("wanted", [NONE, 0, 2])
def test_tokens_that_a_request_names_have_log_probabilities(wanted: int) -> None:
    """vLLM looks them up by the request of each row; here these are as many as a path may have."""
    named = {0: 3, 4: 9}  # nobody in the batch is the fourth
    scene = Scene([6, 6, 4, 6], (2,), wanted=wanted, named=named, seed=7)
    scores, width = scene.run().logprobs_tensors, TREE.max_depth + 1
    assert (scores.wanted, scores.max_per_req_token_ids) == (max(wanted, 0), 3)
    assert scores.logprob_token_ids_state is scene.sampler.logprob_token_ids_state
    assert scores.expanded_idx_mapping.tolist() == np.repeat(scene.requests, width).tolist()
    assert len(scores.logits) == len(scores.expanded_idx_mapping) == len(scores.tokens)


@pytest.mark.parametrize("running", ["padded", "others", "none"])
def test_rows_with_logits_decide(running: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's tables have rows and sequences more; those of other trees do not fit, and a dummy step has none at all."""
    scene = Scene([6, 3, 6])
    step = scene.shared.step
    if running == "padded":
        step.begin(step.drafted, 5, 20)
        monkeypatch.setattr(tree_sampler.trees, "tables", lambda *_, **__: pytest.fail("they are there"))
    elif running == "others":
        step.begin(step.drafted._replace(sizes=np.array([3, 6, 6], np.int32)), 3, 15)
    else:
        step.tables = None
    assert_accepted(scene, scene.run(), scene.walked())


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"bad_words": ["no"]},
        {"structured_outputs": object()},
        {"thinking_token_budget": 0},
    ],
)
def test_history_needs_the_root_alone(changes: dict[str, Any]) -> None:
    """Faults H13, H17 and I11: honoured. vLLM would take the drafts before a row for its history, which in a tree they
    are not.
    """
    plain = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "bad_words": None,
        "structured_outputs": None,
    }
    assert not needs_root_alone(SimpleNamespace(**plain, temperature=0.7, logit_bias={1: 3}))
    assert not needs_root_alone(SimpleNamespace(**plain, thinking_token_budget=None))
    assert needs_root_alone(SimpleNamespace(**(plain | changes)))


def test_walks_have_no_rows_behind_their_end() -> None:
    """Of rows that nobody accepted the root stands there, which any reader may look at."""
    tables = tables_of([TREE, TREE.prefix(3)])
    drafts = torch.tensor([9, 1, 2, 3, 4, 5, 9, 1, 2], dtype=torch.int32)
    choices = torch.tensor([2, 0, 4, 0, 5, 7, 2, 0, 4], dtype=torch.int32)
    walked = walk(tables, drafts, choices, 4, "eager")
    assert walked.path.tolist() == [[0, 2, 4, 5], [0, 2, 0, 0]]
    assert walked.tokens.tolist() == [[2, 4, 5, 7], [2, 4, -1, -1]]
    assert walked.counts.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("rates", "want"),
    [([0.8, 0.4, 0.1, 0.0], [0.8, 0.5, 0.25]), ([1.0, 1.0, 1.0], [1.0] * 3), ([0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0])],
)
def test_rates_by_depth(rates: list[float], want: list[float]) -> None:
    """How many paths reach a depth, from how many reach the one before."""
    assert depth_rates(rates, 3) == pytest.approx(want)


def test_rates_deeper_than_the_tree_are_refused() -> None:
    with pytest.raises(RequestError, match=r"it is 3\.3 tokens per step.* has 3 levels\. Ask for 4 tokens at most"):
        depth_rates([0.9, 0.8, 0.5, 0.1], 3)


class Chances:
    """Synthetic acceptance over steps of random drafts."""

    def __init__(self, tree: DraftTree, rates: list[float], num_ids: int = 50) -> None:
        self.tree, self.num_ids = tree, num_ids
        self.random = np.random.default_rng(5)
        self.synthetic = Synthetic(tree, depth_rates(rates, tree.max_depth), num_ids, "cpu")

    def choose(self, rows: list[int]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return tables, tokens and choices of requests; siblings have tokens of their own."""
        tables = tables_of([self.tree.prefix(size) for size in rows])
        drafts = [self.random.permutation(self.num_ids)[: self.tree.num_rows][:size] for size in rows]
        tokens = torch.from_numpy(np.concatenate(drafts)).to(torch.int32)
        choices = torch.from_numpy(self.random.integers(self.num_ids, size=len(tokens))).to(torch.int32)
        chosen = self.synthetic.override(tables, tokens, choices)
        assert ((chosen >= 0) & (chosen < self.num_ids)).all()
        return tables, tokens, chosen

    def run(self, rows: list[int]) -> list[list[int]]:
        """Return the path of each request."""
        walked = walk(*self.choose(rows), self.tree.max_depth + 1, "eager")
        return [path[:count] for path, count in zip(walked.path.tolist(), walked.counts.tolist(), strict=True)]


def test_paths_go_on_as_often_as_asked() -> None:
    """At each depth, and to each child as often as to its siblings; from the last level nowhere."""
    tree, rates, num_seqs = DraftTree.from_widths((3, 1, 2)), [0.8, 0.6, 0.3], 1000
    _, tokens, chosen = (
        part.view(num_seqs, -1) if isinstance(part, torch.Tensor) else part
        for part in Chances(tree, [*rates, *[0.0] * 9]).choose([tree.num_rows] * num_seqs)
    )
    on = [0.8, 0.75, 0.5, 0.0]  # of paths that got there
    for row in range(tree.num_rows):
        taken = chosen[:, row, None] == tokens[:, tree.children(row)]
        # Four standard deviations and a little.
        assert float(taken.any(1).float().mean()) == pytest.approx(on[tree.depth[row]], abs=0.065)
        for child in taken.float().mean(0).tolist():
            assert child == pytest.approx(on[tree.depth[row]] / taken.shape[1], abs=0.065)


def test_walks_by_chance_are_as_long_as_asked() -> None:
    tree = DraftTree.from_widths((2, 2))
    paths = Chances(tree, [1.0, 0.5, *[0.0] * 4]).run([tree.num_rows] * 200)
    assert {len(path) for path in paths} == {2, 3}
    assert sum(len(path) == 3 for path in paths) == pytest.approx(100, abs=30)
    assert {row for path in paths for row in path} == set(range(tree.num_rows))


def test_chance_stays_within_a_cut_tree() -> None:
    """Fault I14: rows that the scheduler cut off are another request's, or nobody's."""
    tree = DraftTree.from_widths((3, 1, 2))
    chances = Chances(tree, [1.0, 1.0, 1.0, *[0.0] * 9])
    for _ in range(10):
        rows = [int(size) for size in chances.random.integers(1, tree.num_rows + 1, size=20)]
        for size, path in zip(rows, chances.run(rows), strict=True):
            assert path[-1] < size
            assert path == tree.path(path[-1])


def test_chance_takes_no_token_of_the_next_request() -> None:
    tree = DraftTree.from_widths((3, 1, 2))
    synthetic = Synthetic(tree, [1.0] * 3, 50, "cpu")
    drafts = torch.arange(10, 24, dtype=torch.int32)
    choices = torch.full((14,), 5, dtype=torch.int32)
    chosen = synthetic.override(tables_of([tree.prefix(1), tree]), drafts, choices)
    assert chosen[0] == 5
    assert chosen[1] in drafts[2:5]


def test_chance_takes_no_draft_that_may_not_be_accepted() -> None:
    tree = DraftTree.from_widths((2, 2))
    synthetic = Synthetic(tree, [1.0, 1.0], 9, "cpu")
    drafts, choices = torch.full((7,), -1, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    chosen = synthetic.override(tables_of([tree]), drafts, choices)
    assert torch.equal(chosen, choices)


def test_whoever_ends_has_no_childs_token() -> None:
    """Also where the target's own token is a child's, and the next ids are its siblings'."""
    tree = DraftTree.from_widths((4,))
    synthetic = Synthetic(tree, [0.0], 6, "cpu")
    for choice in range(6):
        for first in range(6):
            drafts = torch.tensor([0, *[(first + place) % 6 for place in range(4)]], dtype=torch.int32)
            choices = torch.full((5,), choice, dtype=torch.int32)
            chosen = synthetic.override(tables_of([tree]), drafts, choices)
            assert 0 <= int(chosen[0]) < 6
            assert int(chosen[0]) not in drafts[1:].tolist()
            assert (int(chosen[0]) == choice) == (choice not in drafts[1:].tolist())
            assert torch.equal(chosen[1:], choices[1:])


def test_every_worker_draws_the_same() -> None:
    """Those of a tensor parallel engine must accept alike."""
    tree = DraftTree.from_widths((2, 2))
    one, other = (Chances(tree, [0.7, 0.4, *[0.0] * 4]) for _ in range(2))
    first = one.run([7] * 30)
    assert first == other.run([7] * 30)
    assert one.run([7] * 30) == other.run([7] * 30) != first


def test_chance_overrides_the_target() -> None:
    rates = [1.0, 1.0, *[0.0] * 3]
    scene = Scene([6] * 4, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)
    out = scene.run()
    # The first child has no children: a path that takes it ends there.
    assert set(out.num_sampled.tolist()) <= {2, 3}
    assert Scene([6] * 4).made.synthetic is None
