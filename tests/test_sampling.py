"""Laws over tokens against their definition, draws against theirs, and streams that share nothing."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tolerances import LAW_NEIGHBOURS, LAW_ROUNDING
from treewy.errors import RequestError
from treewy.sampling import ACCEPT, DRAFT, Law, Stream, draw, draw_without_replacement, log_probabilities

LAST = float(np.nextafter(1.0, 0.0))

LAWS = [
    Law(),
    Law(temperature=0.3),
    Law(temperature=4.0),
    Law(top_k=1),
    Law(top_k=3),
    Law(top_k=500),
    Law(top_p=0.5),
    Law(top_p=1e-9),
    Law(min_p=0.2),
    Law(min_p=1.0),
    Law(temperature=1.7, top_k=4, top_p=0.8, min_p=0.3),
    Law(temperature=0.6, top_k=7, top_p=0.95, min_p=0.05),
]


def naive(logits: np.ndarray, law: Law) -> np.ndarray:
    """Return one row's law, token by token, as the options are defined."""
    weights = np.exp((logits - logits.max()) / law.temperature)
    chances = {token: weight / weights.sum() for token, weight in enumerate(weights)}
    if law.top_k:
        kth = sorted(chances.values(), reverse=True)[: law.top_k][-1]
        chances = renormalised({token: p for token, p in chances.items() if p >= kth})
    if law.top_p < 1:
        reached, last = 0.0, 0.0
        for p in sorted(chances.values(), reverse=True):
            if reached >= law.top_p:
                break
            reached, last = reached + p, p
        chances = renormalised({token: p for token, p in chances.items() if p >= last})
    most = max(chances.values())
    chances = renormalised({token: p for token, p in chances.items() if p >= law.min_p * most})
    return np.array([chances.get(token, 0.0) for token in range(len(logits))])


def renormalised(chances: dict[int, float]) -> dict[int, float]:
    return {token: p / sum(chances.values()) for token, p in chances.items()}


def one(logits: list[float], law: Law) -> list[float]:
    return law.probabilities(torch.tensor([logits], dtype=torch.float64))[0].tolist()


def from_chances(*chances: float) -> list[float]:
    return np.log(np.array(chances)).tolist()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_is_what_its_options_say(law: Law) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 12)) * rng.choice([0.3, 1, 5], size=(60, 1))
    got = law.probabilities(torch.from_numpy(logits))
    assert got.dtype == torch.float64
    want = np.stack([naive(row, law) for row in logits])
    assert ((got.numpy() > 0) == (want > 0)).all()
    assert np.abs(got.numpy() - want).max() < LAW_ROUNDING
    assert np.abs(got.sum(-1).numpy() - 1).max() < LAW_ROUNDING


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_is_that_of_transformers(law: Law) -> None:
    """Without ties, which transformers cuts through, and in its order: temperature, top-k, top-p, min-p."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(40, 30)) * 2)
    scores = TemperatureLogitsWarper(law.temperature)(None, logits)
    if law.top_k:
        scores = TopKLogitsWarper(law.top_k)(None, scores)
    if law.top_p < 1:
        scores = TopPLogitsWarper(law.top_p)(None, scores)
    if law.min_p:
        scores = MinPLogitsWarper(law.min_p)(None, scores)
    torch.testing.assert_close(law.probabilities(logits), scores.softmax(-1), rtol=0, atol=LAW_ROUNDING)


def test_the_order_of_the_options() -> None:
    """Each option sees what the one before it left; in any other order these would differ."""
    logits = from_chances(0.4, 0.3, 0.2, 0.1)
    # Of two tokens the first has 4/7: enough for top-p 0.5. Of all four it has not.
    assert one(logits, Law(top_k=2, top_p=0.5)) == [1, 0, 0, 0]
    assert np.count_nonzero(one(logits, Law(top_p=0.5))) == 2
    # The flattened law needs more tokens than the given one.
    assert np.count_nonzero(one(logits, Law(temperature=100.0, top_p=0.6))) == 3
    assert np.count_nonzero(one(logits, Law(top_p=0.6))) == 2
    # min-p is a ratio to the most likely token, which truncation does not change and temperature does.
    assert np.count_nonzero(one(logits, Law(temperature=100.0, min_p=0.7))) == 4
    assert np.count_nonzero(one(logits, Law(min_p=0.7))) == 2


def test_ties_stay_together() -> None:
    """Tokens as likely as the last that is kept are kept: no id is favoured."""
    tied = from_chances(0.25, 0.125, 0.25, 0.125, 0.25)
    assert one(tied, Law(top_k=2)) == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert np.count_nonzero(one(tied, Law(top_k=4))) == 5
    assert one(tied, Law(top_p=0.3)) == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert np.count_nonzero(one(tied, Law(top_p=0.8))) == 5
    assert one([2.0] * 8, Law(temperature=1e-3, top_k=1, top_p=0.1, min_p=1.0)) == [1 / 8] * 8


def test_top_p_stops_where_it_is_reached() -> None:
    """The token that reaches it stays; the next one goes, also where it is reached exactly."""
    logits = [2.0, 1.0, 1.0 - np.log(2.0)]
    p = one(logits, Law())
    assert np.count_nonzero(one(logits, Law(top_p=p[0]))) == 1
    assert np.count_nonzero(one(logits, Law(top_p=float(np.nextafter(p[0], 1))))) == 2
    assert np.count_nonzero(one(logits, Law(top_p=LAST))) == 3
    assert np.count_nonzero(one([0.0, 0.0], Law(top_p=5e-324))) == 2


def test_min_p_keeps_what_is_just_likely_enough() -> None:
    # Exact in binary: e ** 0 and half of it.
    half = float(np.log(0.5))
    p = one([0.0, half], Law())
    assert np.count_nonzero(one([0.0, half], Law(min_p=p[1] / p[0]))) == 2
    assert np.count_nonzero(one([0.0, half], Law(min_p=0.51))) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """No overflow: the most likely logit counts as 0. Ties share."""
    law = Law(temperature=temperature)
    assert one([3.0, 7.0, -1e30, 6.0], law) == [0, 1, 0, 0]
    assert one([3.0, 7.0, 7.0, -torch.inf], law) == [0, 0.5, 0.5, 0]


def test_huge_temperatures_are_uniform() -> None:
    assert one([3.0, 7.0, -20.0, -torch.inf], Law(temperature=1e300)) == pytest.approx([1 / 3] * 3 + [0])
    assert one([-1e308, 1e308], Law(temperature=1.7e308)) == [0, 1]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_rows_that_are_no_law_are_nan_and_alone(law: Law) -> None:
    """A row with a NaN, with +inf or without a finite logit gives NaN throughout; its neighbours are as without it."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 9)))
    logits[0, 4], logits[2, :], logits[4, 1] = torch.nan, -torch.inf, torch.inf
    got = law.probabilities(logits)
    assert got[[0, 2, 4]].isnan().all()
    assert torch.equal(got[[1, 3, 5]], law.probabilities(logits[[1, 3, 5]]))


@pytest.mark.parametrize("law", [LAWS[0], LAWS[-1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(law: Law, dtype: torch.dtype) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(33, 1000))).to(dtype)
    whole = law.probabilities(logits)
    for rows in ([7], [32, 7, 0], list(range(33))[::-1]):
        torch.testing.assert_close(law.probabilities(logits[rows]), whole[rows], rtol=LAW_NEIGHBOURS, atol=0)


def test_sums_are_in_float64() -> None:
    """A vocabulary of small float32 logits: in float32 the sum would be off at the seventh digit."""
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(1, 150_000)).astype(np.float32))
    weights = np.exp(logits.numpy()[0].astype(np.longdouble))
    want = (weights / weights.sum()).astype(np.float64)
    assert np.abs(Law().probabilities(logits)[0].numpy() / want - 1).max() < LAW_ROUNDING
    wide = log_probabilities(logits.double())[0].numpy()
    assert np.abs(wide - np.log(want)).max() < 100 * LAW_ROUNDING


@pytest.mark.parametrize(
    ("dtype", "want"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_log_probabilities_are_the_models_own(dtype: torch.dtype, want: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.5]], dtype=dtype)
    got = log_probabilities(logits)
    assert got.dtype == want
    torch.testing.assert_close(got.exp().double(), Law().probabilities(logits), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "finite temperature above 0; got 0.0"),
        ({"temperature": -1.0}, "above 0; got -1.0"),
        ({"temperature": float("nan")}, "above 0; got nan"),
        ({"temperature": float("inf")}, "above 0; got inf"),
        ({"top_k": -1}, "top_k must be an integer of at least 0; got -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]; got 0.0"),
        ({"top_p": 1.01}, "got 1.01"),
        ({"top_p": float("nan")}, "got nan"),
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\]; got -0.1"),
        ({"min_p": 1.5}, "got 1.5"),
        ({"min_p": float("nan")}, "got nan"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Law(**options)


# Draws.


@pytest.mark.parametrize(
    ("weights", "uniform", "want"),
    [
        ([0.0, 2.0, 3.0, 0.0], 0.0, 1),
        ([0.0, 2.0, 3.0, 0.0], 0.39999, 1),
        ([0.0, 2.0, 3.0, 0.0], 0.4, 2),
        ([0.0, 2.0, 3.0, 0.0], LAST, 2),
        ([0.0, 1.0, 0.0, 0.0, 1.0, 0.0], 0.5, 4),
        ([0.0, 1e-320, 0.0], LAST, 1),
        ([0.1] * 10 + [0.0], LAST, 9),
        ([1.0, 1e-30, 0.0], LAST, 0),
    ],
)
def test_draw_at_the_edges(weights: list[float], uniform: float, want: int) -> None:
    """A number may be 0 and never 1; what has no weight is never drawn, first, last or between."""
    assert draw(np.array(weights), uniform) == want
    drawn = draw_without_replacement(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([[uniform]], dtype=torch.float64)
    )
    assert drawn.tolist() == [[want]]


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.3, 1.0]), min_size=1, max_size=9), st.data())
def test_no_weight_is_never_drawn(weights: list[float], data: st.DataObject) -> None:
    uniforms = st.one_of(st.sampled_from([0.0, LAST]), st.floats(0, LAST))
    each = data.draw(st.lists(uniforms, min_size=len(weights), max_size=len(weights)))
    if any(weights):
        assert weights[draw(np.array(weights), each[0])] > 0
    drawn = draw_without_replacement(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([each], dtype=torch.float64)
    )[0]
    support = int(np.count_nonzero(weights))
    assert sorted(drawn.tolist()) == list(range(len(weights))), "some token came twice"
    assert all(weights[token] > 0 for token in drawn[:support].tolist())
    # Once the support is used up: the lowest ids not taken, in order.
    rest = drawn[support:].tolist()
    assert rest == sorted(rest)


def test_draw_follows_the_weights() -> None:
    """The numbers that give a token make up its share, to a grid point: of a grid of 1,000, weights 1, 2, 3, 4 take 100 each."""
    grid = (np.arange(1000) + 0.5) / 1000
    drawn = [draw(np.array([1.0, 2.0, 0.0, 3.0, 4.0]), uniform) for uniform in grid]
    assert np.bincount(drawn).tolist() == [100, 200, 0, 300, 400]
    assert drawn == sorted(drawn)


def test_draws_without_replacement_follow_the_law() -> None:
    """Exactly: over a grid on which every conditional share is a whole number of points."""
    law, size = np.array([1.0, 2.0, 0.0, 3.0]) / 6, 60
    grid = (np.arange(size) + 0.5) / size
    uniforms = torch.tensor(list(itertools.product(grid, repeat=2)), dtype=torch.float64)
    rows = torch.from_numpy(law).expand(len(uniforms), -1)
    pairs, counts = np.unique(draw_without_replacement(rows, uniforms).numpy(), axis=0, return_counts=True)
    got = {tuple(pair): count / size**2 for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)}
    want = {(a, b): law[a] * law[b] / (1 - law[a]) for a in range(4) for b in range(4) if a != b and law[a] * law[b]}
    assert got == pytest.approx(want, abs=1e-12)


def test_draws_of_a_row_are_its_own() -> None:
    """Rows do not share numbers, and what is drawn first does not depend on how much is drawn after it."""
    rng = np.random.default_rng(5)
    laws = torch.from_numpy(rng.random((7, 9)) * (rng.random((7, 9)) < 0.6))
    uniforms = torch.from_numpy(rng.random((7, 4)))
    before = laws.clone()
    together = draw_without_replacement(laws, uniforms)
    assert torch.equal(laws, before)
    for row in range(7):
        assert torch.equal(draw_without_replacement(laws[[row]], uniforms[[row]])[0], together[row])
    assert torch.equal(draw_without_replacement(laws, uniforms[:, :2]), together[:, :2])


def test_a_row_of_zeros_draws_nothing() -> None:
    laws = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()
    assert draw_without_replacement(laws, torch.full((2, 3), 0.9, dtype=torch.float64)).tolist() == [
        [0, 1, 2],
        [2, 0, 1],
    ]


# Streams.


def test_a_seed_gives_the_same_numbers() -> None:
    """Whatever they are asked for: one at a time, in blocks, as flips or as draws."""
    numbers = Stream(7, DRAFT).uniform(12)
    again = Stream(7, DRAFT)
    assert np.concatenate([again.uniform(2, 3).ravel(), again.uniform(6)]).tolist() == numbers.tolist()
    flips, draws = Stream(7, DRAFT), Stream(7, DRAFT)
    assert [flips.flip(0.5) for _ in numbers] == (numbers < 0.5).tolist()
    assert [draws.draw(np.ones(4)) for _ in numbers] == (numbers * 4).astype(int).tolist()


def test_flips_that_are_certain() -> None:
    stream = Stream(1, ACCEPT)
    assert all(stream.flip(p) for p in (1.0, 1.5, float("inf")) for _ in range(200))
    assert not any(stream.flip(0.0) for _ in range(200))


def test_what_is_impossible_stays_so_at_the_lowest_number() -> None:
    class Lowest:
        def random(self) -> float:
            return 0.0

    stream = Stream(1, ACCEPT)
    stream._generator = Lowest()
    assert not stream.flip(0.0)
    assert stream.draw(np.array([0.0, 1.0])) == 1


def test_streams_share_no_number() -> None:
    """Fault H05: purposes of one seed, and neighbouring seeds, have nothing in common, also at another offset."""
    streams = [Stream(seed, purpose) for seed in (0, 1, 2, 2**63, 2**64, 2**70) for purpose in (DRAFT, ACCEPT)]
    numbers = np.stack([stream.uniform(2000) for stream in streams])
    assert len(np.unique(numbers)) == numbers.size
    correlations = np.corrcoef(numbers) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / 2000**0.5


def test_without_a_seed_streams_are_fresh() -> None:
    numbers = [Stream(None, purpose).uniform(4).tolist() for purpose in (DRAFT, DRAFT, ACCEPT)]
    assert len({number for four in numbers for number in four}) == 12
