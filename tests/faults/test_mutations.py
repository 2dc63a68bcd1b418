"""Each reported fault, put back into a copy of the source by one line, is seen by a test of that fault.

A few on every run; all of them with TREEWY_MUTATIONS=all, which takes about a quarter of an hour on one core.
"""

import os
import re
from pathlib import Path

import pytest

from faults.mutations import MUTATIONS, copy, run, run_mutated

# One per room, all quick.
SAMPLE = (
    "A02",
    "B01",
    "C03",
    "F02",
    "F08",
    "G05",
    "H08",
    "I08",
    "C10 kernel",
    "F02 kernel",
    "K02",
    "D05 vllm",
    "E02 vllm",
)
CHOSEN = {"": SAMPLE, "all": tuple(MUTATIONS)}[os.environ.get("TREEWY_MUTATIONS", "")]


def test_whatever_must_see_a_fault_can_be_run(tmp_path: Path) -> None:
    """All of it, also what is not run each time: a copy has what its tests import and read."""
    copy(tmp_path)
    result = run(tmp_path, "--collect-only", *{mutation.caught_by for mutation in MUTATIONS.values()})
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-2000:]}"


@pytest.mark.parametrize("label", CHOSEN)
def test_a_fault_put_back_is_seen(label: str, tmp_path: Path) -> None:
    """By tests that fail, not by a run that finds no tests or cannot import what it tests."""
    result = run_mutated(MUTATIONS[label], tmp_path)
    assert result.returncode == 1, f"exit code {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-2000:]}"
    assert re.search(r"^FAILED tests/", result.stdout, re.MULTILINE)
    assert not re.search(r"NameError|ImportError|SyntaxError", result.stdout)
