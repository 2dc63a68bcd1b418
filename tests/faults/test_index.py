"""The index of reported faults and the tests that name them agree."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
INDEX = tomllib.loads((Path(__file__).parent / "index.toml").read_text())
LABEL = re.compile(r"\b[A-L]\d\d\b")


@cache
def labels_of_tests() -> dict[str, set[str]]:
    """Return the fault labels that each test's docstring names."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        if path.parent == Path(__file__).parent:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                found[f"{path.relative_to(TESTS)}::{node.name}"] = set(LABEL.findall(ast.get_docstring(node) or ""))
    return found


@pytest.mark.parametrize("label", INDEX)
def test_a_fault_has_tests_that_name_it_or_a_reason(label: str) -> None:
    entry = INDEX[label]
    assert entry["source"].startswith("https://")
    assert ("tests" in entry) != ("later" in entry)
    for test in entry.get("tests", []):
        assert label in labels_of_tests()[test]


def test_every_test_that_names_a_fault_is_in_the_index() -> None:
    for test, labels in labels_of_tests().items():
        for label in labels:
            assert test in INDEX[label].get("tests", []), f"{test} names {label}"


@pytest.mark.parametrize("kind", "ABG")
def test_kinds_due_are_complete(kind: str) -> None:
    """Commits, convolution windows and tree structure: every reported fault is tested or waits for a feature."""
    known = {"A": 9, "B": 6, "G": 11}
    assert sum(label[0] == kind for label in INDEX) == known[kind]
