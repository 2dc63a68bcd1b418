"""The index of reported faults, and the source with one line of it changed back into a fault."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SOURCE = Path("src", "treewy")
INDEX: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "index.toml").read_text())
TIMEOUT_S = 900


class Mutation(NamedTuple):
    """A change of one line.

    Attributes:
        file: Below `src/treewy`.
        old, new: The line, without its indentation, as it is and as the fault has it.
        caught_by: The quickest test that fails then, perhaps with its parameters.
        why: How the change is the fault, where that is not plain.
    """

    file: str
    old: str
    new: str
    caught_by: str
    why: str = ""


# By label; where the fault sits in a kernel as well, that one by label and " kernel"; in the plugin for vLLM, by " vllm".
MUTATIONS = {
    name: Mutation(**part[key])
    for label, entry in INDEX.items()
    for name, part, key in (
        (label, entry, "mutation"),
        (f"{label} kernel", entry, "kernel"),
        (f"{label} vllm", entry.get("vllm", {}), "mutation"),
    )
    if key in part
}


def mutated(mutation: Mutation) -> str:
    """Return the file's text with its one line changed."""
    lines = (ROOT / SOURCE / mutation.file).read_text().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.strip() == mutation.old]
    assert len(places) == 1, f"{mutation.file} must hold the line once, not {len(places)} times: {mutation.old}"
    (place,) = places
    lines[place] = lines[place].replace(mutation.old, mutation.new)
    return "".join(lines)


def run_mutated(mutation: Mutation, folder: Path) -> subprocess.CompletedProcess[str]:
    """Copy source, tests and pages to `folder`, change the line there, and run the test that must see it."""
    copy(folder)
    (folder / SOURCE / mutation.file).write_text(mutated(mutation))
    return run(folder, "--tb=line", mutation.caught_by)


def copy(folder: Path) -> None:
    """Copy source and tests to `folder`, and lay what tests only read beside them."""
    shutil.copytree(ROOT / SOURCE, folder / SOURCE, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copytree(TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / SOURCE / "assets").symlink_to(ROOT / SOURCE / "assets")


def run(folder: Path, option: str, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy, up to the first that fails."""
    # The copy comes before an installed package; no compiled file of one source is taken for that of another.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-x", "-q", "--color=no", option, "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=TIMEOUT_S,
        check=False,
    )
