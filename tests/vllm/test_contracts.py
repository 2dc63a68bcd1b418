"""What the plugin takes for granted of the installed vLLM: a change of any of it must be read by somebody first."""

import ast

import pytest
from contracts import Contract, installed_root, moved, normalised, pinned, read_contracts, version_of

from treewy.vllm_plugin import compat, hooks, versions

PINS = pinned()


def test_both_tested_versions_are_pinned() -> None:
    """Every hook of each."""
    assert set(PINS) == {"0.26.0", "0.32.0"}
    for version, pins in PINS.items():
        minor = versions.Version.parse(version)[:2]
        assert sorted(key.split(":")[1] for key in pins) == sorted(hook.name for hook in hooks.of_version(minor))


@pytest.mark.parametrize("version", PINS)
def test_the_probe_expects_what_is_pinned(version: str) -> None:
    """Of the version that is not installed, too."""
    expected = {
        (hook.module.removeprefix("vllm."), hook.name): hook.parameters
        for hook in hooks.of_version(versions.Version.parse(version)[:2])
    }
    found = {}
    for key, pin in PINS[version].items():
        file, name = key.split(":")
        arguments = ast.parse(f"def f{pin.signature}: ...").body[0].args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        found[file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), name] = " ".join(names)
    assert found == expected


def test_upstream_has_not_moved() -> None:
    """On a patch release of a tested version, as on the version itself."""
    version = versions.installed()
    assert versions.is_tested(version)
    assert version == version_of(installed_root())
    pins = next(pins for name, pins in PINS.items() if versions.Version.parse(name)[:2] == version[:2])
    assert moved(pins, read_contracts(installed_root(), version[:2])) == []


def test_hooks_are_as_the_probe_expects() -> None:
    assert hooks.find_mismatches(hooks.of_version(versions.installed()[:2]), on_cpu=compat.platform() == "cpu") == []
    versions.check(on_cpu=compat.platform() == "cpu")


def test_names_are_there() -> None:
    names = compat.names()
    assert names.__name__.rpartition(".")[2] == f"v{versions.installed().minor:03d}"
    for name in names.__all__:
        assert getattr(names, name) is not None
    assert issubclass(names.mamba_hybrid.MambaHybridModelState, names.MambaHybridModelState)
    assert compat.engine_arguments().__name__ == "EngineArgs"


def function(source: str) -> ast.AST:
    return ast.parse(source).body[0]


SOURCE = 'def f(x: int, *, y=1):\n    """Say."""\n    # why\n    return (x +\n            y)\n'


@pytest.mark.parametrize(
    "same",
    [
        "def f(x: int, *, y=1):\n    return x + y\n",
        'def f(x: int, *, y=1):\n    """Say more."""\n    return x + y  # because\n',
    ],
)
def test_words_and_layout_do_not_count(same: str) -> None:
    assert normalised(function(SOURCE)) == normalised(function(same))


@pytest.mark.parametrize(
    "other",
    [
        "def f(x: int, *, y=1):\n    return x - y\n",
        "def f(x: int, *, y=2):\n    return x + y\n",
        "def f(x: int, y=1):\n    return x + y\n",
        "@cached\ndef f(x: int, *, y=1):\n    return x + y\n",
        "def f(x: int, *, y=1):\n    'Say.'\n    'Say.'\n    return x + y\n",
    ],
)
def test_all_else_counts(other: str) -> None:
    assert normalised(function(SOURCE)) != normalised(function(other))


def test_a_move_is_named() -> None:
    pins = {"a.py:f": Contract("(x)", "1"), "a.py:g": Contract("(x)", "1"), "a.py:h": Contract("(x)", "1")}
    found = {"a.py:f": Contract("(x)", "1"), "a.py:g": Contract("(x, y)", "1"), "a.py:i": Contract("()", "2")}
    assert moved(pins, found) == ["upstream moved: a.py:g", "upstream moved: a.py:h", "not pinned: a.py:i"]
