"""Acceptance over tables: every backend has the outcome of `treewy.accept`, number for number."""

import numpy as np
import pytest
import torch

from ops import drafted
from ops.compiling import Case, compile_all
from treewy import accept as rules
from treewy.errors import BackendError, RequestError, ShapeError, TreeError, UnsupportedError
from treewy.ops import accept, tree
from treewy.ops.accept import Ending, kernels
from treewy.ops.launch import LAUNCHES
from treewy.packed import pack
from treewy.sampling import ACCEPT, DRAFT, Law, Stream
from treewy.tree import DraftTree

BACKENDS = ["reference", "eager", "triton"]
VOCAB = 151_936


def parts(accepted: accept.AcceptedTables) -> tuple[torch.Tensor, ...]:
    return (*accepted.path, accepted.tokens, accepted.endings, accepted.num_used)


def assert_same(got: accept.AcceptedTables, want: accept.AcceptedTables) -> None:
    for one, other in zip(parts(got), parts(want), strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, other), (got, want)


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(len(tokens) - 1).with_tokens(tokens)


def operands(*trees: DraftTree, num_rows: int | None = None):
    """Return the tables of trees and the tokens of all rows."""
    packed = pack(trees, num_rows=num_rows)
    tokens = [token for shape in trees for token in shape.tokens]
    return packed.tables, torch.tensor(tokens + [7] * (packed.num_rows - len(tokens)), dtype=torch.int32)


def int32(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of tens of tokens span chunks and blocks."""
    monkeypatch.setattr(kernels, "SEARCH", (8, 2))
    monkeypatch.setattr(kernels, "SUMS", {torch.float32: (8, 1), torch.float64: (4, 2)})


# Greedy


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.usefixtures("small_blocks")
def test_greedy_walks_are_those_of_the_rule(backend):
    """Faults G05 and G13: ragged batches with padding, slots of -1, twins, walks of every length, cut or not."""
    lengths = []
    for seed in range(25):
        batch = drafted.make(seed, num_seqs=seed % 4, vocab=5 + seed, num_levels=4 if seed % 3 else None)
        room = None if seed % 2 else 1 + seed % 5
        before = LAUNCHES["accept_choices_kernel"], LAUNCHES["accept_walk_kernel"]
        got = batch.greedy(max_path=room, backend=backend)
        ran = backend == "triton"
        assert LAUNCHES["accept_choices_kernel"] == before[0] + (ran and batch.tree.num_rows > 0)
        assert LAUNCHES["accept_walk_kernel"] == before[1] + (ran and batch.tree.num_seqs > 0)
        assert_same(got, batch.greedy(max_path=room, backend="reference"))
        lengths += got.lengths.tolist()
    assert max(lengths) >= 5, "no walk went deep: the test shows little"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_walk_says_of_its_end(backend):
    """Recovered, bonus, cut, not finite after one row and at once, no slot, no rows; an empty path for the last three."""
    trees = [chain(1, 2, 3), chain(1, 2), chain(1, 2, 3, 4), chain(1, 2, 3), chain(1), chain(1, 2)]
    tables, tokens = operands(*trees, num_rows=17)
    tables = tree.tables(tables.parents, torch.cat([tables.cu_rows, tables.cu_rows[-1:]]), max_rows=4)
    choices = int32([2, 9, 9, 2, 5, 2, 3, 4, 6, 2, -1, 9, -1, 2, 9, 7, 7])
    slots = torch.tensor([0, 1, 2, 3, 4, -1, 5])
    got = accept.walk_choices(tables, tokens, choices, slots=slots, max_path=2, backend=backend)
    endings = ["RECOVERED", "BONUS", "CUT", "NOT_FINITE", "NOT_FINITE", "NOTHING", "NOTHING"]
    assert [Ending(ending).name for ending in got.endings.tolist()] == endings
    assert got.lengths.tolist() == [2, 2, 2, 1, 0, 0, 0]
    assert got.tokens.tolist() == [[2, 9], [2, 5], [2, 3], [2, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert got.path.rows.tolist() == [[0, 1], [3, 4], [5, 6], [9, 17], [17, 17], [17, 17], [17, 17]]
    assert not got.num_used.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [16, VOCAB])
def test_ties_go_to_the_lowest_id(backend, dtype, vocab):
    """Fault F13: logits equal at 5, 9, the last id, and in the same place of every block give 5; the last alone is found."""
    logits = torch.full((2, vocab), -1.0, dtype=dtype)
    logits[0, [5, 9, vocab - 1, *range(5, vocab, 4096)]] = 2.0
    logits[1, vocab - 1] = 2.0
    assert accept.choices(logits, backend=backend).tolist() == [5, vocab - 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [0, 3, 10, 29])
@pytest.mark.usefixtures("small_blocks")
def test_logits_that_say_nothing(backend, place):
    """Fault F10: a NaN anywhere, an infinite maximum, or no finite logit give no token; minus infinity is a logit."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    logits[0, place], logits[1, place], logits[2, place] = float("nan"), float("inf"), float("-inf")
    logits[3], logits[4] = float("-inf"), float("nan")
    want = [-1, -1, int(logits[2].argmax()), -1, -1, int(logits[5].argmax())]
    assert accept.choices(logits, backend=backend).tolist() == want
    tables, tokens = operands(*[chain(3)] * 6)
    law = accept.request_laws([Law(), None] * 3)
    got = accept.sampled(tables, tokens, logits, law, torch.full((6, 1), 0.5), backend=backend)
    assert (got.endings == Ending.NOT_FINITE).tolist() == [token < 0 for token in want]
    assert got.lengths.tolist() == [int(token >= 0) for token in want]
    assert got.num_used.tolist() == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nobody_owns_are_not_read(backend):
    """Padding and rows on slot -1: no choice, whatever their logits are."""
    tables, tokens = operands(chain(1, 2), chain(1, 2), num_rows=6)
    logits = torch.nn.functional.one_hot(torch.tensor([2, 3, 2, 3, 4, 4]), 6).float()
    slots = torch.tensor([5, -1])
    assert accept.choices(logits, tables=tables, slots=slots, backend=backend).tolist() == [2, 3, -1, -1, -1, -1]
    assert accept.choices(logits, tables=tables, backend=backend).tolist() == [2, 3, 2, 3, -1, -1]
    got = accept.greedy(tables, tokens, logits, slots=slots, backend=backend)
    assert (got.lengths.tolist(), got.tokens.tolist()) == ([2, 0], [[2, 3], [-1, -1]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_placeholder_is_never_accepted(backend):
    """Fault H16: draft token -1 stands for nothing, also where the choice is none. The host refuses such drafts."""
    tables, tokens = operands(chain(1, 2, 3))
    tokens[1] = -1
    for choice in (-1, 0):
        choices = int32([choice, 3, 3])
        if backend == "reference":
            with pytest.raises(TreeError, match="token -1"):
                accept.walk_choices(tables, tokens, choices, backend=backend)
        else:
            got = accept.walk_choices(tables, tokens, choices, backend=backend)
            assert got.lengths.tolist() == [int(choice == 0)]


# Sampled


@pytest.mark.parametrize(("backend", "seeds"), [("eager", 200), ("triton", 24)])
@pytest.mark.usefixtures("small_blocks")
def test_sampled_walks_are_those_of_the_rule(backend, seeds):
    """Faults H08 and H15: drawn and chosen children, laws used up, every mix of filters, with the same numbers."""
    lengths, num_fallen = [], 0
    for seed in range(seeds):
        batch = drafted.make(
            seed, num_seqs=seed % 4, vocab=3 + seed % 20, max_support=3 if seed % 2 else None,
            num_levels=[None, 4, 12][seed % 3],
        )  # fmt: skip
        room = None if seed % 5 else 2
        before = LAUNCHES["accept_sampled_kernel"]
        got = batch.sampled(max_path=room, drawn=seed % 4 != 1, backend=backend)
        assert LAUNCHES["accept_sampled_kernel"] == before + (backend == "triton" and batch.tree.num_seqs > 0)
        assert_same(got, batch.sampled(max_path=room, drawn=seed % 4 != 1, backend="reference"))
        lengths += got.lengths.tolist()
        num_fallen += int((got.num_used > got.lengths).sum())
    assert max(lengths) >= 4, "no walk went deep: the test shows little"
    assert num_fallen > seeds / 5, "too few siblings fell: the test shows little"


@pytest.mark.usefixtures("small_blocks")
def test_laws_that_are_not_there():
    """A row that names a law past the last: nothing is read there, and its children count as chosen."""
    batch = drafted.make(7, num_seqs=3, vocab=20)
    far = torch.full_like(batch.drawn.law_of_row, 10**6)
    drawn = batch.drawn._replace(law_of_row=far)
    got = accept.sampled(
        batch.tree.tables, batch.tokens, batch.logits, batch.laws, batch.uniforms,
        drawn=drawn, slots=batch.slots, backend="triton",
    )  # fmt: skip
    want = batch.sampled(backend="triton", drawn=False)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.num_used, want.num_used)


def test_siblings_that_fall():
    """Fault H08: several in a row, each tested against what the ones before it left; then a draw from what all left."""
    rng, num, vocab = np.random.default_rng(4), 40, 9
    laws, tokens = rng.dirichlet(np.full(vocab, 2.0), num), np.zeros((num, 6), dtype=int)
    laws[::4] = np.where(np.argsort(np.argsort(laws[::4])) > 5, laws[::4], 0)
    laws /= laws.sum(1, keepdims=True)
    for seq in range(num):
        tokens[seq, 1:] = drafted.siblings(rng, laws[seq], 5)
    tables, tokens = operands(*[DraftTree([-1, 0, 0, 0, 0, 0]).with_tokens(row) for row in tokens.tolist()])
    logits = torch.tensor(np.log(rng.dirichlet(np.full(vocab, 2.0), num)), dtype=torch.float32).repeat_interleave(6, 0)
    law_of_row = torch.where(torch.arange(6 * num) % 6 == 0, torch.arange(6 * num) // 6, -1).int()
    # Large numbers: drafts fall until hardly anything is left.
    numbers, drawn = torch.tensor(rng.uniform(0.4, 1, (num, 6))), accept.DrawnLaws(torch.tensor(laws), law_of_row)
    requests = accept.request_laws([Law(), Law(top_k=7)] * (num // 2))
    got, want = (
        accept.sampled(tables, tokens, logits, requests, numbers, drawn=drawn, max_path=1, backend=backend)
        for backend in ("triton", "reference")
    )
    assert_same(got, want)
    assert len(set(got.num_used.tolist())) == 6, "not every number of fallen siblings occurs"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_they_are_those_of_accept_sampled(backend, num_drafts):
    """Against `accept.sampled` itself, with the coin of the engine: the stream of a seed, on the host and on the device."""
    rng, vocab, law = np.random.default_rng(3), 11, Law(temperature=0.8, top_p=0.95)
    seeds, drafter = [5, 6, 7], rng.random(vocab)
    drafter /= drafter.sum()
    streams = [Stream(seed, ACCEPT) for seed in seeds]
    keys, positions = torch.tensor([stream.key for stream in streams]), torch.zeros(3, dtype=torch.int64)
    shape = DraftTree([-1, 0, 0, 1][: num_drafts + 1])
    for step in range(6):
        drawn = rng.choice(vocab, 2, replace=False, p=drafter)
        trees = [shape.with_tokens([0, *drawn, 4][: num_drafts + 1]) for _ in seeds]
        tables, tokens = operands(*trees)
        logits = torch.tensor(rng.normal(size=(tables.num_rows, vocab)), dtype=torch.float32)
        law_of_row = torch.full((tables.num_rows,), -1, dtype=torch.int32)
        if num_drafts:
            law_of_row[tables.cu_rows[:-1].long()] = 0
        numbers = accept.uniforms(keys, positions, tables.max_rows, backend=backend)
        drawn_laws = accept.DrawnLaws(torch.tensor(drafter)[None], law_of_row)
        requests = accept.request_laws([law] * 3)
        got = accept.sampled(tables, tokens, logits, requests, numbers, drawn=drawn_laws, backend=backend)
        for seq, (draft, stream) in enumerate(zip(trees, streams, strict=True)):
            rows = slice(tables.cu_rows[seq], tables.cu_rows[seq + 1])
            target = law.probabilities(logits[rows]).numpy()
            want = rules.sampled(draft, target, {0: drafter} if num_drafts else {}, stream)
            length = len(want.tokens)
            assert got.tokens[seq].tolist() == want.tokens + [-1] * (tables.max_rows - length), (step, seq)
            assert (got.path.rows[seq, :length] - tables.cu_rows[seq]).tolist() == want.path
            assert (got.endings[seq] == Ending.BONUS) == want.is_bonus
        positions += got.num_used
    assert [stream.uniform(1)[0] for stream in streams] == accept.uniforms(keys, positions, 1).flatten().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_chosen_drafts_change_no_token_and_no_number(backend):
    """Fault H12: one number per token, with drafts, without, with good ones and bad; greedy requests take none."""
    rng, vocab = np.random.default_rng(8), 6
    logits = torch.tensor(rng.normal(size=(8, vocab)), dtype=torch.float32)
    numbers = torch.tensor(rng.random((1, 8)))
    texts = []
    for draft in ([0] * 8, [1] * 8, None):
        text, taken = [], 0
        while len(text) < 6:
            depth = 0 if draft is None else min(2, 5 - len(text))
            tables, tokens = operands(chain(*[0, *(draft or [])][: depth + 1]))
            got = accept.sampled(
                tables, tokens, logits[len(text) : len(text) + depth + 1], accept.request_laws([Law()]),
                numbers[:, taken:], backend=backend,
            )  # fmt: skip
            text += got.tokens[0, : int(got.lengths)].tolist()
            taken += int(got.num_used)
            assert taken == len(text)
        texts.append(text)
    assert texts[0] == texts[1] == texts[2]


GRID = 12


@pytest.mark.usefixtures("small_blocks")
def test_the_law_by_enumeration():
    """Numbers on a grid, one sequence each: every token comes exactly as often as its law says, filtered or not."""
    p = np.array([2, 0, 3, 1, 0, 4, 0, 2]) / 12
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(p), dtype=torch.float32)
    tables, tokens = operands(*[chain(0)] * GRID)
    numbers = ((torch.arange(GRID) + 0.5) / GRID)[:, None].double()
    for law, want in [
        (Law(), p),
        (Law(top_k=2), np.array([0, 0, 3, 0, 0, 4, 0, 0]) / 7),
        (Law(top_k=3), np.array([2, 0, 3, 0, 0, 4, 0, 2]) / 11),
        (Law(top_p=0.6), np.array([2, 0, 3, 0, 0, 4, 0, 2]) / 11),
        (Law(top_p=0.3), np.array([0, 0, 0, 0, 0, 1, 0, 0])),
        (Law(min_p=0.4), np.array([2, 0, 3, 0, 0, 4, 0, 2]) / 11),
        (Law(temperature=0.5), p**2 / (p**2).sum()),
    ]:
        got = accept.sampled(
            tables, tokens, logits.expand(GRID, -1), accept.request_laws([law] * GRID), numbers, backend="triton",
            weights=torch.float32,
        )  # fmt: skip
        counts = np.bincount(got.tokens[:, 0], minlength=8)
        # A boundary between grid points moves by less than one point: at both ends of a token's span.
        assert np.abs(counts - want * GRID).max() < 1 + 1e-4
        assert not counts[want == 0].any()


@pytest.mark.parametrize("levels", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_filters_keep_what_the_law_keeps(levels, dtype):
    """Ties at the thresholds, signed zeros, minus infinity, filters that keep all or one; any temperature."""
    rng, vocab, num = np.random.default_rng(levels), 21, 16
    values = rng.integers(-levels, levels, (num, vocab)) * rng.choice([1e-3, 0.5, 7.0], (num, 1))
    logits = torch.tensor(np.where(rng.random((num, vocab)) < 0.1, -values * 0.0, values), dtype=dtype)
    logits[rng.random((num, vocab)) < 0.1] = float("-inf")
    laws = [
        Law(
            temperature=float(rng.choice([1e-3, 0.7, 1.0, 50.0])),
            top_k=int(rng.choice([0, 1, 2, 7, 20, 21, 99])),
            top_p=float(rng.choice([1e-9, 0.2, 0.5, 0.99, 1.0 - 1e-12, 1.0])),
            min_p=float(rng.choice([0.0, 0.01, 0.5, 1.0])),
        )
        for _ in range(num)
    ]
    tables, tokens = operands(*[chain(0)] * num)
    numbers = torch.tensor(rng.random((num, 1)))
    requests = accept.request_laws(laws)
    got = [
        accept.sampled(tables, tokens, logits, requests, numbers, backend=backend) for backend in ("eager", "triton")
    ]
    assert_same(*got)


@pytest.mark.usefixtures("small_blocks")
def test_float32_weights_have_nearly_every_outcome():
    """They are off by 2e-6 of themselves: of thousands of numbers, none lies so near to where two tokens meet."""
    different = [
        not torch.equal(batch.sampled(backend="triton", weights=torch.float32).tokens, batch.sampled().tokens)
        for batch in (drafted.make(seed, num_seqs=3, vocab=20) for seed in range(100, 105))
    ]
    assert not any(different)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.usefixtures("small_blocks")
def test_only_rows_on_the_way_are_read(backend):
    """NaN in every other row of logits, in laws of rows that are not reached, and in working memory: nothing changes."""
    for seed in range(5):
        batch = drafted.make(seed, num_seqs=2, vocab=16)
        want = batch.sampled(backend="reference")
        reached = {int(row) for row in want.path.rows.flatten() if row < batch.tree.num_rows}
        others = [row for row in range(batch.tree.num_rows) if row not in reached]
        laws = batch.drawn.laws.clone()
        used = {int(batch.drawn.law_of_row[row]) for row in reached}
        laws[[place for place in range(len(laws)) if place not in used]] = float("nan")
        batch.logits[others] = float("nan")
        out = accept.empty(2, batch.tree.max_size, batch.tree.max_size)
        out.notes.fill_(float("nan"))
        poisoned = batch._replace(drawn=batch.drawn._replace(laws=laws))
        assert_same(poisoned.sampled(backend=backend, out=out), want)


@pytest.mark.usefixtures("small_blocks")
def test_neighbours_change_nothing():
    """Fault D-kind: a sequence alone, in the batch, and with more room has one outcome."""
    batch = drafted.make(2, num_seqs=3, vocab=10)
    want = batch.sampled(backend="triton", slots=None)
    tables = batch.tree.tables
    for seq in range(3):
        rows = slice(batch.tree.starts[seq], batch.tree.starts[seq + 1])
        alone = accept.sampled(
            tree.tables(tables.parents[rows], int32([0, rows.stop - rows.start]), max_rows=tables.max_rows),
            batch.tokens[rows], batch.logits[rows], type(batch.laws)(*(x[seq : seq + 1] for x in batch.laws)),
            batch.uniforms[seq : seq + 1], backend="triton",
            drawn=batch.drawn._replace(law_of_row=batch.drawn.law_of_row[rows]),
        )  # fmt: skip
        length = int(want.lengths[seq])
        assert torch.equal(alone.tokens[0], want.tokens[seq])
        assert torch.equal(alone.path.rows[0, :length] + rows.start, want.path.rows[seq, :length])
        assert int(alone.num_used) == int(want.num_used[seq])


def test_a_draft_that_its_law_could_not_give_falls():
    """On the device: the next sibling is tested, no number is taken. On the host: an error."""
    tables, tokens = operands(DraftTree([-1, 0, 0, 0]).with_tokens([0, 2, 1, 0]))
    logits, numbers = torch.zeros(4, 3), torch.tensor([[0.99, 0.6, 0.6, 0.6]])
    requests = accept.request_laws([Law()])
    for impossible in (2, -1, 3, 10**6):
        tokens[1] = impossible
        drawn = accept.DrawnLaws(torch.tensor([[0.5, 0.5, 0.0]]), int32([0, -1, -1, -1]))
        got = accept.sampled(tables, tokens, logits, requests, numbers, drawn=drawn, backend="triton")
        # Draft 1 falls at 0.99, p = 1/3 over q = 1/2; draft 0 is then all that q has, and p has lost both: 2 is left.
        assert (got.tokens[0, 0], got.num_used, got.endings) == (2, 3, Ending.RECOVERED)
    tokens[1] = 2
    for backend in ("reference", "eager"):
        with pytest.raises(TreeError, match="row 1 holds 2"):
            accept.sampled(tables, tokens, logits, requests, numbers, drawn=drawn, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_that_leaves_nothing_accepts(backend):
    """Where the laws are equal a draft stands for sure; a number of 1 is a coin that rounded."""
    tables, tokens = operands(DraftTree([-1, 0, 0]).with_tokens([0, 1, 2]))
    drawn = accept.DrawnLaws(torch.full((1, 4), 0.25), int32([0, -1, -1]))
    numbers = torch.tensor([[1.0, 0.5, 0.5]])
    got = accept.sampled(
        tables, tokens, torch.zeros(3, 4), accept.request_laws([Law()]), numbers, drawn=drawn, backend=backend
    )
    assert (got.tokens[0].tolist(), got.num_used.tolist()) == ([1, 2, -1], [2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0.0, np.nextafter(1, 0)])
def test_a_token_of_weight_0_is_never_drawn(backend, number):
    """At the first number and at the last, weights of 0 at both ends."""
    logits = torch.tensor([[-1e4, 0.0, -1e4, 1.0, -1e4, -1e4]])
    tables, tokens = operands(chain(0))
    got = accept.sampled(
        tables, tokens, logits, accept.request_laws([Law()]), torch.tensor([[number]], dtype=torch.float64),
        backend=backend,
    )  # fmt: skip
    assert got.tokens.tolist() == [[1 if number == 0 else 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_is_the_hosts(backend):
    """Faults H05 and H10: the numbers of a seed, from any position; those of drafts are others."""
    streams = [Stream(seed, purpose) for seed in (0, 1, 2**70) for purpose in (DRAFT, ACCEPT)]
    keys = torch.tensor([stream.key for stream in streams])
    positions = torch.tensor([0, 1, 2, 3, 4, 1001])
    before = LAUNCHES["accept_uniforms_kernel"]
    got = accept.uniforms(keys, positions, 150, backend=backend)
    assert LAUNCHES["accept_uniforms_kernel"] == before + (backend == "triton")
    for stream, position, numbers in zip(streams, positions.tolist(), got, strict=True):
        assert stream.uniform(position + 150)[position:].tolist() == numbers.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_none(backend):
    tables, tokens = operands(num_rows=2)
    numbers, requests = torch.zeros(0, 0), accept.request_laws([])
    none = torch.zeros(0, dtype=torch.int64)
    for got in (
        accept.greedy(tables, tokens, torch.zeros(2, 5), slots=none, backend=backend),
        accept.sampled(tables, tokens, torch.zeros(2, 5), requests, numbers, slots=none, backend=backend),
    ):
        assert (got.tokens.shape, got.lengths.shape) == ((0, 0), (0,))
    assert accept.uniforms(none.reshape(0, 2), none, 3, backend=backend).shape == (0, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_are_written_whole(backend):
    """Fault C10: what a longer walk left is gone, also where a sequence has no slot."""
    batch = drafted.make(5, num_seqs=3, vocab=12)
    out = accept.empty(3, batch.tree.max_size, batch.tree.max_size)
    choices = torch.full((batch.tree.num_rows,), 99, dtype=torch.int32)
    for buffer in parts(out):
        buffer.fill_(99)
    slots = torch.tensor([0, -1, -1])
    assert_same(batch.greedy(out=out, out_choices=choices, backend=backend), batch.greedy())
    assert_same(batch.sampled(out=out, backend=backend), batch.sampled())
    got = batch.sampled(out=out, slots=slots, backend=backend)
    assert_same(got, batch.sampled(slots=slots))
    assert got is out


def test_views():
    """Fault K12: logits that are columns of a wider tensor, and numbers that are; transposed ones are refused."""
    batch = drafted.make(4, num_seqs=2, vocab=20)
    wide = torch.full((batch.tree.num_rows, 50), float("nan"))
    wide[:, 3:23] = batch.logits
    numbers = torch.full((2, 40), float("nan"), dtype=torch.float64)
    numbers[:, 5 : 5 + batch.uniforms.shape[1]] = batch.uniforms
    view = batch._replace(logits=wide[:, 3:23], uniforms=numbers[:, 5 : 5 + batch.uniforms.shape[1]])
    assert_same(view.sampled(backend="triton"), batch.sampled())
    assert_same(view.greedy(backend="triton"), batch.greedy())
    with pytest.raises(ShapeError, match="logits must lie side by side"):
        batch._replace(logits=batch.logits.T.contiguous().T).greedy(backend="triton")


IN_RANGE = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A value out of range, and the one that kernels take it for.
OUT_OF_RANGE = [
    ("temperature", -1.0, 0.0), ("temperature", torch.nan, 0.0), ("temperature", torch.inf, 1e9),
    ("top_k", -1, 0), ("top_k", -(2**40), 0),
    ("top_p", 0.0, 1e-9), ("top_p", -0.5, 1e-9), ("top_p", torch.nan, 1.0),
    ("min_p", 2.0, 1.0), ("min_p", torch.inf, 1.0), ("min_p", -0.5, 0.0), ("min_p", torch.nan, 0.0),
]  # fmt: skip
TAKEN_FOR = [*OUT_OF_RANGE, ("top_p", 1.5, 1.0), ("top_p", torch.inf, 1.0), ("top_k", 2**32 + 1, 0)]


def with_laws(batch: drafted.Drafted, name: str, value: float, *, only: int | None = None) -> drafted.Drafted:
    """Return the batch with one value of every law, or of one sequence's, set; the others are in range."""
    columns = {}
    for field, usual in IN_RANGE.items():
        dtype = torch.int64 if field == "top_k" else torch.float64
        columns[field] = torch.full((batch.tree.num_seqs,), usual, dtype=dtype)
        if field == name:
            columns[field][slice(None) if only is None else only] = value
    return batch._replace(laws=accept.RequestLaws(**columns))


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize(("name", "value", "_"), OUT_OF_RANGE)
def test_a_law_out_of_range_is_refused_on_the_host(backend, name, value, _):
    """One check for both; what is on no slot is not looked at, and the rest of a greedy law has no effect."""
    batch = drafted.make(4, num_seqs=2, vocab=20)
    wrong = with_laws(batch._replace(slots=int32([0, 1])), name, value, only=1)
    with pytest.raises(RequestError, match="got"):
        wrong.sampled(backend=backend)
    assert int(wrong._replace(slots=int32([0, -1])).sampled(backend=backend).endings[1]) == Ending.NOTHING
    if name != "temperature":
        cold = wrong._replace(laws=wrong.laws._replace(temperature=torch.zeros(2)))
        assert_same(cold.sampled(backend=backend), cold.greedy(backend=backend))


@pytest.mark.parametrize(("name", "value", "taken_for"), TAKEN_FOR)
@pytest.mark.usefixtures("small_blocks")
def test_kernels_take_a_law_out_of_range_for_the_nearest(name, value, taken_for):
    for seed in range(3):
        batch = drafted.make(seed, num_seqs=3, vocab=20)
        got = with_laws(batch, name, value).sampled(backend="triton")
        assert_same(got, with_laws(batch, name, taken_for).sampled(backend="reference"))
        assert int(got.lengths.sum()) > 0


def test_what_does_not_fit_is_refused():
    batch = drafted.make(4, num_seqs=2, vocab=20)
    short = {"tokens": batch.tokens[1:], "logits": batch.logits[1:]}
    for wrong, words in [
        (short, "tokens must have one row per packed row"),
        ({"uniforms": batch.uniforms[:, 1:]}, "at least max_rows"),
        ({"drawn": batch.drawn._replace(laws=batch.drawn.laws[:, 1:])}, "drawn over the target's 20 tokens"),
        ({"drawn": batch.drawn._replace(law_of_row=batch.drawn.law_of_row[1:])}, "law_of_row must have one row"),
        ({"laws": accept.request_laws([None])}, "laws and uniforms must have 2 sequences"),
        ({"slots": batch.slots[1:], "uniforms": batch.uniforms[1:]}, "slots must have 2 entries"),
    ]:
        with pytest.raises(ShapeError, match=words):
            batch._replace(**wrong).sampled()
    with pytest.raises(ShapeError, match="logits must have one row per packed row"):
        accept.choices(batch.logits[1:], tables=batch.tree.tables)
    with pytest.raises(ShapeError, match="tokens must have one row per packed row"):
        accept.walk_choices(batch.tree.tables, batch.tokens[1:], batch.tokens[1:])
    with pytest.raises(ShapeError, match="out must be made for these bounds"):
        batch.sampled(out=accept.empty(2, 5, 1))
    with pytest.raises(ShapeError, match="slots must come with the tables"):
        accept.choices(batch.logits, slots=batch.slots)
    with pytest.raises(ShapeError, match="out must be contiguous int32"):
        accept.choices(batch.logits, out=torch.zeros(batch.tree.num_rows, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="weights must be"):
        batch.sampled(weights=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="Kernels read float32"):
        batch._replace(logits=batch.logits.double()).sampled(backend="triton")
    with pytest.raises(ShapeError, match="keys and positions must be int64"):
        accept.uniforms(torch.zeros(1, 2, dtype=torch.int64), int32([0]), 3)


def test_an_unknown_backend_is_refused():
    """Never another one in its place."""
    batch = drafted.make(4, num_seqs=2, vocab=20)
    tables, none = batch.tree.tables, torch.zeros(0, dtype=torch.int64)
    for call in (
        lambda: batch.sampled(backend="cuda"),
        lambda: batch.greedy(backend="cuda"),
        lambda: accept.walk_choices(tables, batch.tokens, batch.tokens, backend="cuda"),
        lambda: accept.uniforms(none.reshape(0, 2), none, 3, backend="cuda"),
        lambda: tree.tables(tables.parents, tables.cu_rows, max_rows=9, backend="cuda"),
        lambda: tree.paths(tables, int32([0, 0]), backend="cuda"),
    ):
        with pytest.raises(BackendError, match="has no cuda kernel"):
            call()


def test_they_compile_for_gpus_that_are_not_here():
    """For real vocabularies; hardly any shared memory."""
    int32s = ["parents", "cu_rows", "seq_of_row", "tokens", "slots", "rows", "out_tokens", "lengths", "endings"]
    tables = {**dict.fromkeys([*int32s, "num_used"], "*i32:16"), "num_rows": "i32", "room": "i32"}
    sizes = {"HAS_SLOTS": True, "BT": 64, "BP": 64}
    module = "treewy.ops.accept"
    search, sums = kernels.split(VOCAB, *kernels.SEARCH), kernels.split(VOCAB, *kernels.SUMS[torch.float32])
    read = {"V": VOCAB, "NC": search.num_chunks, "U": search.num_blocks, "BV": search.block}
    cases = [
        Case(
            f"{module}.walking:accept_choices_kernel",
            {"logits": "*bf16:16", "seq_of_row": "*i32", "slots": "*i64", "choices": "*i32", "stride": "i32:16"},
            {"HAS_TABLES": True, "HAS_SLOTS": True, **read}, {"num_warps": kernels.WARPS},
        ),
        Case(f"{module}.walking:accept_walk_kernel", {**tables, "choices": "*i32"}, sizes, {"num_warps": 1}),
        Case(
            f"{module}.philox:accept_uniforms_kernel",
            {"keys": "*i64", "positions": "*i64", "uniforms": "*fp64", "num": "i32"}, {"BU": 128}, {"num_warps": 4},
        ),
    ]  # fmt: skip
    small = compile_all(cases)
    numbers = dict.fromkeys(["temperature", "top_p", "min_p", "uniforms", "notes", "laws"], "*fp64:16")
    strides = dict.fromkeys(["max_rows", "logits_stride", "uniforms_stride", "laws_stride", "num_laws"], "i32")
    reads = {"NX": search.num_chunks, "UX": search.num_blocks, "BX": search.block, "V": VOCAB, "DT": "tl.float32"}
    reads |= {"NC": sums.num_chunks, "U": sums.num_blocks, "BV": sums.block, "BC": 32}
    more = {"logits": "*bf16:16", "top_k": "*i32", "law_of_row": "*i32", **numbers, **strides}
    case = Case(
        f"{module}.drawing:accept_sampled_kernel", {**tables, **more}, {**sizes, **reads, "HAS_LAWS": True},
        {"num_warps": kernels.WARPS},
    )  # fmt: skip
    for compiled in [*small, *compile_all([case], archs=(80, 120))]:
        assert compiled.shared <= 4096, compiled
        assert compiled.registers <= 128, compiled
        assert compiled.stack <= (256 if "sampled" in compiled.case else 0), compiled
