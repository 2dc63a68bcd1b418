"""What the package promises of itself: its names, its weight at import, its layers, its docstrings."""

import ast
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import treewy

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "treewy"
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
MODULES = sorted(SOURCE.rglob("*.py"))

# Folders that are no part of the package's own code.
DATA = ("assets",)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the source tree, without the tests' import hook."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_public_names() -> None:
    """Pinned: a name that comes or goes is a decision, not an accident."""
    names = ["Budget", "DraftTree", "Engine", "Generation", "SamplingParams"]
    names += ["accept", "draft", "generate", "load", "ops"]
    assert sorted(treewy.__all__) == names
    assert set(names) <= set(dir(treewy))
    for name in names:
        assert getattr(treewy, name) is not None
    assert {"accept", "attention", "conv", "gdn", "tree"} <= set(dir(treewy.ops))
    with pytest.raises(AttributeError, match="no attribute 'speculate'"):
        _ = treewy.speculate


def test_public_names_of_the_delta_rule() -> None:
    """Pinned, as engines of other people call them."""
    assert treewy.ops.gdn.__all__ == [
        "History",
        "Prior",
        "Projections",
        "Record",
        "Snapshots",
        "Verified",
        "append",
        "choose_folds",
        "commit",
        "commit_snapshots",
        "commit_verify",
        "finish_gates",
        "fits",
        "fold",
        "l2_normalise",
        "scale_queries",
        "settle",
        "verify",
        "verify_snapshots",
    ]


def test_public_names_of_the_convolution() -> None:
    """Pinned, as engines of other people call them."""
    assert treewy.ops.conv.__all__ == ["Split", "commit", "verify", "verify_split"]
    assert treewy.ops.__all__ == ["Facts", "accept", "attention", "conv", "gdn", "tree", "warmup"]


def test_public_names_of_trees_and_acceptance() -> None:
    """Pinned: what builds a captured step."""
    assert treewy.ops.tree.__all__ == ["FAULT_BOUNDS", "FAULT_PARENT", "FAULT_SIZE", "empty", "paths", "tables"]
    assert treewy.ops.accept.__all__ == [
        "AcceptedTables",
        "DrawnLaws",
        "Ending",
        "RequestLaws",
        "choices",
        "empty",
        "greedy",
        "request_laws",
        "sampled",
        "uniforms",
        "walk_choices",
    ]


@pytest.mark.parametrize(
    "name", ["bench.ops", "cache", "draft", "engine", "hf", "model", "ops", "planner", "vllm_plugin"]
)
def test_rooms_export_what_they_list(name: str) -> None:
    """Every name in a room's `__all__` is there, and each is listed once."""
    room = __import__(f"treewy.{name}", fromlist=["__all__"])
    assert len(set(room.__all__)) == len(room.__all__)
    for listed in room.__all__:
        assert getattr(room, listed) is not None


def test_importing_the_package_is_light() -> None:
    """Neither torch nor transformers, until a name needs it."""
    script = (
        "import sys, treewy\n"
        "heavy = {'torch', 'transformers', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert treewy.__version__ and 'load' in dir(treewy)\n"
        "treewy.DraftTree\n"
        "assert 'transformers' not in sys.modules\n"
    )
    result = run("-c", script)
    assert result.returncode == 0, result.stderr


def test_the_library_needs_no_transformers_and_warns_of_nothing() -> None:
    """Ops, caches, drafters and the engine import without it; only the checkpoint target brings it. No warning is ours."""
    script = (
        "import sys, treewy\n"
        "treewy.ops, treewy.accept, treewy.Engine, treewy.SamplingParams\n"
        "import treewy.model, treewy.draft, treewy.cache, treewy.ops.gdn.reference\n"
        "assert 'transformers' not in sys.modules\n"
        "treewy.load\n"
        "assert 'transformers' in sys.modules\n"
    )
    result = run("-W", "always", "-c", script)
    assert result.returncode == 0, result.stderr
    assert "treewy" not in result.stderr


def public_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield what documentation shows: the module, and public classes and functions down to methods."""
    yield "module", tree
    stack: list[tuple[str, ast.AST]] = [(node.name, node) for node in tree.body if hasattr(node, "name")]
    while stack:
        name, node = stack.pop()
        if name.split(".")[-1].startswith("_"):
            continue
        yield name, node
        if isinstance(node, ast.ClassDef):
            stack += [(f"{name}.{child.name}", child) for child in node.body if hasattr(child, "name")]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_everything_public_has_a_docstring(file: Path) -> None:
    if any(part in DATA for part in file.parts):
        return
    missing = [name for name, node in public_nodes(ast.parse(file.read_text())) if not ast.get_docstring(node)]
    assert not missing


def imported(file: Path) -> Iterator[str]:
    """Yield the modules of treewy that a file imports at run time, at top level or inside functions."""
    tree = ast.parse(file.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("treewy"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("treewy"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int | None:
    """Return the place of a module's room in the list of layers, highest first; None for the package itself."""
    for place, layer in enumerate(LAYERS):
        if any(module == room or module.startswith(f"{room}.") for room in layer.replace(" ", "").split("|")):
            return place
    return None


def test_no_module_imports_upwards() -> None:
    """Every room stands in the list of layers, and imports from its own or from lower ones only."""
    for file in MODULES:
        if file.parent == SOURCE and file.name == "__init__.py":
            continue
        module = ".".join(("treewy", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        own = layer_of(module)
        assert own is not None, f"{module} is in no layer of pyproject.toml"
        for other in imported(file):
            layer = layer_of(other)
            assert layer is not None, f"{module} imports {other} through the package's own door"
            assert layer >= own, f"{module} imports upwards: {other}"


def test_import_linter_agrees() -> None:
    """The same by import-linter, where it is installed, as `scripts/check` has it."""
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.is_file():
        return
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    result = subprocess.run(
        [linter, "--no-cache"], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_errors_form_one_tree() -> None:
    """Everything raised on purpose is a TreeWYError; what a bad argument causes is a ValueError as well."""
    from treewy import errors

    classes = [x for x in vars(errors).values() if inspect.isclass(x)]
    assert all(issubclass(x, errors.TreeWYError) for x in classes)
    value_errors = {x.__name__ for x in classes if issubclass(x, ValueError)}
    assert value_errors == {"TreeError", "ShapeError", "RequestError"}
    assert str(errors.BackendError("No.", install="pip install x")) == "No. Install it with: pip install x"
