"""The harness itself: annotations are enforced, and a skip that nobody asked for fails the run."""

import inspect
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

from ops.problems import SHAPES, make
from treewy.errors import ShapeError
from treewy.ops import conv, gdn
from treewy.packed import pack
from treewy.tree import DraftTree

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TypeCheckError = jaxtyping.TypeCheckError


def bad_operands():
    good = make([SHAPES["scattered"], SHAPES["chain 3"]], heads=2, group=2, key_dim=8, value_dim=6)
    yield "q too short", good._replace(q=good.q[:-1])
    yield "k of another width", good._replace(k=good.k[..., :-1])
    yield "v of another row count", good._replace(v=good.v[1:])
    yield "v without heads", good._replace(v=good.v[:, 0])
    yield "g of key heads", good._replace(g=good.g[:, :2])
    yield "beta of one head", good._replace(beta=good.beta[:, :1])
    yield "state transposed", good._replace(state=good.state.transpose(-1, -2))
    yield "state of key heads", good._replace(state=good.state[:, :2])
    yield "state of one slot", good._replace(state=good.state[0])
    yield "slots of one sequence", good._replace(slots=good.slots[:1])
    yield "a batch axis", good._replace(q=good.q[None], k=good.k[None])
    yield "another tree", good._replace(tree=pack([SHAPES["scattered"]]))
    yield "heads that do not divide", good._replace(q=good.q[:, [0, 1, 1]], k=good.k[:, [0, 1, 1]])


@pytest.mark.parametrize(("name", "problem"), [pytest.param(*case, id=case[0]) for case in bad_operands()])
class TestShapes:
    def test_a_wrong_shape_is_refused_under_the_hook(self, name, problem):
        with pytest.raises((ShapeError, TypeCheckError)):
            gdn.verify(*problem)

    def test_a_wrong_shape_is_refused_without_the_hook(self, name, problem):
        for verify in (gdn.verify, gdn.verify_snapshots):
            with pytest.raises(ShapeError, match="got"):
                inspect.unwrap(verify)(*problem)


def test_annotations_are_checked_where_no_code_checks():
    """`l2_normalise` has no shape check of its own: what refuses is the annotation."""
    with pytest.raises(TypeCheckError):
        gdn.l2_normalise(torch.zeros(3, 4))
    with pytest.raises(TypeCheckError):
        gdn.l2_normalise(torch.zeros(3, 2, 4, dtype=torch.int64))
    assert inspect.unwrap(gdn.l2_normalise)(torch.zeros(3, 4)).shape == (3, 4)


def test_types_are_checked():
    tree = pack([DraftTree.chain(1)])
    with pytest.raises(TypeCheckError):
        conv.verify(torch.zeros(2, 3), torch.zeros(3, 4), None, torch.zeros(1, 3, 3), torch.zeros(1), tree)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        pytest.param("def test_b(): pytest.skip('why not')", 1, "1 passed, 1 skipped, 1 refused skips", id="skip"),
        pytest.param("pytest.skip('all', allow_module_level=True)", 1, "1 refused skips", id="module"),
        pytest.param(
            "@pytest.mark.gpu\ndef test_b(): assert torch.cuda.is_available()", 0, "0 refused skips", id="gpu"
        ),
    ],
)
def test_only_gpu_tests_may_skip(tmp_path, body, code, line):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    (tmp_path / "test_b.py").write_text(f"import pytest, torch\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {"PYTHONPATH": str(CONFTEST.parent), "PATH": ""}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == code, run.stdout + run.stderr
    assert line in run.stdout
