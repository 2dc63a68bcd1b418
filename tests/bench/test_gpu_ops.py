"""Timing on a real device: graphs are captured and replayed, and their times are of this world."""

import pytest
import torch

from treewy.bench.ops import Case, Prepared, copy_bandwidth, graph_times, make_problem
from treewy.bench.ops.peers import PEERS
from treewy.errors import BackendError

pytestmark = pytest.mark.gpu


def test_a_copy_moves_what_it_should():
    bandwidth = copy_bandwidth("cuda", 10)
    assert 5e10 < bandwidth < 2e13
    source = torch.zeros(1 << 28, device="cuda")
    targets = [torch.empty_like(source) for _ in range(2)]
    calls = {
        "one": Prepared([lambda: targets[0].copy_(source)]),
        "two": Prepared([lambda: targets[0].copy_(source), lambda: targets[1].copy_(source)]),
    }
    times = graph_times(calls, "cuda", 10)
    # Per call, so that twice the calls take the same.
    assert times["two"].median == pytest.approx(times["one"].median, rel=0.1)
    assert times["one"].median * 1e-6 == pytest.approx(2 * source.numel() * 4 / bandwidth, rel=0.2)


@pytest.mark.parametrize("policy", ["ring", "reconstruct", "cycle"])
def test_problems_are_made_on_the_device(policy):
    problem = make_problem(Case(policy, "chain4", 8), "cuda")
    assert problem.state.is_cuda
    assert problem.num_sets * problem.floor_bytes > 3 * 60e6
    for name, prepare in PEERS.items():
        if (policy == "cycle") == name.endswith("cycle"):
            try:
                prepared = prepare(problem)
            except BackendError:
                continue
            assert graph_times({name: prepared}, "cuda", 3)[name].median > 1
