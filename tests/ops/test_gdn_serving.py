"""The serving entry's definition: over many steps it is the walk, and the finished ops one after the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.checks import assert_close
from ops.problems import trees
from ops.serving import HARD, Spec, Stream
from tolerances import EXACT

both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])


@both_backends
@settings(max_examples=25)
@given(data=st.data())
def test_random_steps(backend, data):
    """Every mix of paths, folds, histories and idle sequences gives the walk's outputs, step after step."""
    hard = data.draw(st.booleans())
    spec = (HARD if hard else Spec(strong_gate=data.draw(st.sampled_from([0.0, -20.0, -200.0]))))._replace(
        heads=data.draw(st.integers(1, 2)), group=data.draw(st.integers(1, 3)), key_dim=5, value_dim=3
    )
    num_rows = data.draw(st.sampled_from([0, 9]))
    stream = Stream(spec, 4, num_rows, backend=backend)
    last = None
    for seed in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.permutations([-1, 0, 1, 2, 3]))[: data.draw(st.integers(1, 3))]
        drafts = [data.draw(trees(5)) for _ in slots]
        slots, paths = slots if last is None else last[0], [[] for _ in slots]
        if last is not None:
            drafts = [data.draw(trees(5)) for _ in slots]
            paths = [tree.path(data.draw(st.integers(0, tree.num_rows - 1))) for tree in last[1]]
            paths = [path if data.draw(st.booleans()) else [] for path in paths]
        fold = [int(data.draw(st.booleans())) for _ in slots]
        if num_rows:
            lengths = [int(stream.history.lengths[slot]) for slot in slots]
            fold = [fold[i] or int(lengths[i] + len(paths[i]) > num_rows) for i in range(len(slots))]
        verified, want = stream.step(slots, drafts, paths=paths, fold=fold, seed=seed)
        assert_close(verified.o, want, EXACT)
        last = slots, drafts
