"""Signatures and hashes of the functions of vLLM that the plugin overrides or calls, read from source without importing it.

    python tests/vllm/contracts.py [FOLDER_OF_VLLM ...]

writes `contracts.toml` again: for the installed vLLM, or for the sources named. Do so after reading what changed upstream,
and after mending what it broke here.
"""

import ast
import hashlib
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from treewy.vllm_plugin.hooks import Hook, of_version
from treewy.vllm_plugin.versions import Version

FILE = Path(__file__).with_suffix(".toml")
# Not the same in every version of Python, and no part of what a function does.
UNSTABLE = ("ctx", "kind", "type_comment", "type_params", "type_ignores")


class Contract(NamedTuple):
    """What a function was when we read it: its parameters as they stand in its source, and its body."""

    signature: str
    body: str


def installed_root() -> Path:
    """Return the folder of the installed vLLM, without importing it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def version_of(root: Path) -> Version:
    """Return the version that a source tree says it is."""
    for node in ast.walk(ast.parse((root / "_version.py").read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return Version.parse(node.value.value)
    raise AssertionError(f"{root} says no version")


def read_contracts(root: Path, minor: tuple[int, int]) -> dict[str, Contract]:
    """Return the contracts of a version's hooks, by "file:function"; hooks that are not there are left out."""
    return dict(found for hook in of_version(minor) for found in _read(root, hook))


def pinned() -> dict[str, dict[str, Contract]]:
    """Return the contracts of `contracts.toml`, by version."""
    stored = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
    return {version: {key: Contract(*both) for key, both in pins.items()} for version, pins in stored.items()}


def moved(pins: dict[str, Contract], found: dict[str, Contract]) -> list[str]:
    """Return a line for each pinned function that is otherwise now, and for each that is there but not pinned."""
    lines = [f"upstream moved: {key}" for key, pin in pins.items() if found.get(key) != pin]
    return lines + [f"not pinned: {key}" for key in found if key not in pins]


def normalised(node: ast.AST) -> str:
    """Return what a piece of source does, whatever its comments, docstrings, layout and Python's version."""
    parts = []
    for name, value in ast.iter_fields(node):
        if name not in UNSTABLE:
            parts.append(f"{name}={_normalised_value(_without_docstring(node, name, value))}")
    return f"{type(node).__name__}({', '.join(parts)})"


def _normalised_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_normalised_value, value))}]"
    return normalised(value) if isinstance(value, ast.AST) else repr(value)


def _without_docstring(node: ast.AST, name: str, value: object) -> object:
    documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
    if documented and name == "body" and ast.get_docstring(node) is not None:
        return node.body[1:]
    return value


def _read(root: Path, hook: Hook) -> Iterator[tuple[str, Contract]]:
    path = root.joinpath(*hook.module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    node = _find(ast.parse(file.read_text()), hook.name)
    if node is not None:
        body = hashlib.sha256(normalised(node).encode()).hexdigest()[:16]
        yield f"{file.relative_to(root).as_posix()}:{hook.name}", Contract(f"({ast.unparse(node.args)})", body)


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    found: ast.AST | None = tree
    for part in name.split("."):
        body = getattr(found, "body", ())
        found = next((node for node in body if getattr(node, "name", None) == part), None)
    return found if isinstance(found, ast.FunctionDef) else None


def _write(contracts: dict[str, dict[str, Contract]]) -> None:
    lines = ["# Written by contracts.py, which says when."]
    for version, pins in sorted(contracts.items()):
        lines += ["", f'["{version}"]']
        for key, pin in pins.items():
            assert "'" not in key + pin.body
            signature = pin.signature.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f"'{key}' = [\"{signature}\", '{pin.body}']")
    FILE.write_text("\n".join(lines) + "\n")


def main(folders: list[str]) -> None:
    """Write the contracts of the sources named, beside those of other versions."""
    contracts = pinned()
    for root in map(Path, folders) if folders else [installed_root()]:
        version = version_of(root)
        contracts[str(version)] = read_contracts(root, version[:2])
    _write(contracts)


if __name__ == "__main__":
    main(sys.argv[1:])
