"""The index of reported faults is whole, and agrees with the tests and the source it names."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from faults.mutations import INDEX, MUTATIONS, TESTS, mutated

LABEL = re.compile(r"\b[A-L]\d\d\b")
# Every report, by kind. Numbers left out were never given.
REPORTS = {
    "A": "01 02 03 04 06 08 09 10 12",  # which state is live after acceptance
    "B": "01 02 04 05 06 07",  # convolution window
    "C": "01 03 04 05 06 07 08 09 10 11 12 13",  # slots, padding, replay
    "D": "01 03 04 05 06 07 08 09 10",  # make-up of batches
    "E": "01 02 03 05 06 07 09 10",  # prefix caching
    "F": "01 02 03 05 06 07 08 09 10 11 12 13 14 15",  # numerics
    "G": "01 03 04 05 06 07 08 09 11 12 13",  # tree structure
    "H": "01 02 03 04 05 08 09 10 11 12 13 14 15 16 17",  # acceptance and sampling
    "I": "01 03 04 05 06 07 08 09 10 11 13 14 15 16 17",  # ends, counts, log-probabilities
    "J": "01 02 03 04 05 06 07",  # memory accounting
    "K": "01 02 03 04 05 06 07 08 09 10 12",  # shapes and hardware
    "L": "01 02 03 04 05 06 07 08 09 10 11 12",  # integration
}
NUM_REPORTS = 129
# Kinds that the plugin for vLLM has an answer to, each; and where its tests are: those of the second need a real vLLM.
PLUGIN_KINDS = "ABCDEJL"
PLUGIN_ROOMS = ("vllm_plugin/", "vllm/")


def named_tests(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the tests of a file or a class of it, by the name that pytest takes."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield owner + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from named_tests(node.body, f"{owner}{node.name}::")


@cache
def labels_of_tests() -> dict[str, set[str]]:
    """Return the fault labels that each test's docstring names, by the test's path below `tests`.

    Files are read, not imported: those of `vllm` could not be here.
    """
    return {
        f"{path.relative_to(TESTS)}::{name}": set(LABEL.findall(ast.get_docstring(test) or ""))
        for path in TESTS.rglob("test_*.py")
        for name, test in named_tests(ast.parse(path.read_text()).body, "")
    }


def test_no_report_is_missing() -> None:
    labels = [kind + number for kind, numbers in REPORTS.items() for number in numbers.split()]
    assert list(INDEX) == labels
    assert len(labels) == NUM_REPORTS


@pytest.mark.parametrize("label", INDEX)
def test_a_fault_has_tests_that_name_it_or_a_reason(label: str) -> None:
    """Either tests and mutations, each caught by one of them, or what they wait for."""
    entry = {key: value for key, value in INDEX[label].items() if key != "vllm"}
    answers = [{"tests", "mutation"}, {"tests", "mutation", "kernel"}, {"later"}]
    if "vllm" in INDEX[label]:
        answers.append(set())  # it is of a plugin alone
    assert entry.keys() - {"symptom", "right", "source"} in answers
    assert all(entry.values())
    assert entry["source"].startswith("https://")
    for test in entry.get("tests", []):
        assert label in labels_of_tests()[test]
        assert not test.startswith(PLUGIN_ROOMS)
    for name in MUTATIONS.keys() & {label, f"{label} kernel"}:
        assert MUTATIONS[name].caught_by.partition("[")[0] in entry["tests"]


@pytest.mark.parametrize("label", [label for label in INDEX if label[0] in PLUGIN_KINDS or "vllm" in INDEX[label]])
def test_the_plugin_has_an_answer_to_a_fault(label: str) -> None:
    """Tests and a mutation that one without an engine catches, or why it cannot have the fault, or what they wait for."""
    entry = INDEX[label]["vllm"]
    assert entry.keys() in ({"tests", "mutation"}, {"never"}, {"never", "tests"}, {"later"})
    assert all(entry.values())
    for test in entry.get("tests", []):
        assert label in labels_of_tests()[test]
        assert test.startswith(PLUGIN_ROOMS)
    if "mutation" in entry:
        mutation = MUTATIONS[f"{label} vllm"]
        assert mutation.file.startswith("vllm_plugin/")
        assert mutation.caught_by.partition("[")[0] in entry["tests"]
        assert mutation.caught_by.startswith("vllm_plugin/")


def test_every_test_that_names_a_fault_is_in_the_index() -> None:
    for test, labels in labels_of_tests().items():
        for label in labels:
            listed = [*INDEX[label].get("tests", []), *INDEX[label].get("vllm", {}).get("tests", [])]
            assert test in listed, f"{test} names {label}"


@pytest.mark.parametrize("label", MUTATIONS)
def test_a_mutation_changes_one_line_of_the_source(label: str) -> None:
    """The line is there, once; changed, it is another one, and the file still parses."""
    mutation = MUTATIONS[label]
    assert mutation.old == mutation.old.strip() != mutation.new == mutation.new.strip()
    assert "\n" not in mutation.old + mutation.new
    ast.parse(mutated(mutation))
