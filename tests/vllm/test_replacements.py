"""How little of vLLM the plugin replaces: six names in all, and none in passing."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treewy import vllm_plugin
from treewy.vllm_plugin import compat

SOURCE = Path(vllm_plugin.__path__[0])
SCRIPT = Path(__file__).with_name("replaced.py")
# Where the source sets a name of vLLM, by file and target, and what that is there.
REPLACED = {
    "intake.py arguments.create_engine_config": "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "install.py vllm.mamba_hybrid.MambaHybridModelState": (
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
    ),
    "install.py vllm.mtp.MTPSpeculator": "vllm.v1.worker.gpu.spec_decode.mtp.speculator:MTPSpeculator",
    "first_runner.py runner._build_attention_metadata": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata"
    ),
    "first_runner.py runner._update_states_after_model_execute": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states_after_model_execute"
    ),
    "second_runner.py runner.execute_model": "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
}
ONLY_OLD = "second_runner.py runner.execute_model"
MOST = 6
# What says that a module has been taken hold of: new, in the place of nothing.
MARK = {"install.py vllm.mamba_hybrid._treewy": "vllm.v1.worker.gpu.model_states.mamba_hybrid:_treewy"}
# All other attributes that are set on something else than oneself: on what is ours, or on what vLLM made for one engine,
# one step or one of its layers.
OURS = {
    "first_runner.py build_attention_metadata.treewy",
    "first_runner.py places.announced",
    "first_runner.py places.told",
    "first_runner.py step.num_accepted",
    "layer.py GatedDeltaNet.__name__",
    "layer.py step.counts.logs",
    "second_runner.py execute_model.treewy",
    "state.py self.treewy.step.tracks",
    "tree_attention.py Backend.__module__",
    "tree_attention.py Backend.__qualname__",
    "tree_sampler.py self.trees.path",
}
OF_ONE_ENGINE = {
    "first_runner.py dispatcher.dispatch",
    "intake.py arguments.additional_config",
    "intake.py arguments.speculative_config",
    "tree_attention.py metadata.chains",
    "tree_attention.py metadata.treewy",
    "tree_config.py attention.backend",
    "tree_config.py compilation.cudagraph_capture_sizes",
    "tree_config.py compilation.max_cudagraph_capture_size",
    "tree_drafter.py layers[name].impl.treewy_drafts",
    "tree_drafter.py self.compilation_config.cudagraph_capture_sizes",
    "tree_drafter.py self.compilation_config.max_cudagraph_capture_size",
}
# Ways to set an attribute that are not seen as an assignment to it, and who takes them: to mark its own function, and to read
# what a parameter of ours has.
INDIRECT = ("setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars", "globals", "modules")
TAKEN = ["intake.py setattr", "layer.py vars"]


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Yield the plugin's files, by their names below it."""
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text())


def imported(node: ast.AST) -> list[str]:
    """Return what a piece of source imports: modules by name, or the call as it stands."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [ast.unparse(node)] if isinstance(node, ast.Call) and "import" in ast.unparse(node.func) else []


def test_the_source_replaces_six_names() -> None:
    """Whoever sets another attribute says above what it is of."""
    found = set()
    for file, tree in parsed():
        changed = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        ]
        found |= {f"{file} {ast.unparse(node)}" for node in changed if ast.unparse(node.value) != "self"}
    assert found == REPLACED.keys() | MARK.keys() | OURS | OF_ONE_ENGINE
    assert len(REPLACED) <= MOST


def test_nothing_is_set_by_other_means() -> None:
    """Loops over names, dictionaries of modules and classes, and what tests have for it."""
    nodes = [(file, node) for file, tree in parsed() for node in ast.walk(tree)]
    named = [(file, getattr(node, "attr", getattr(node, "id", None))) for file, node in nodes]
    assert [f"{file} {name}" for file, name in named if name in INDIRECT] == TAKEN


def test_only_compat_imports_vllm() -> None:
    """By name; `versions` asks which version there is, and the probe of hooks reads what they name."""
    found = {}
    for file, tree in parsed():
        asked = [name for node in ast.walk(tree) for name in imported(node)]
        asked = [name for name in asked if name.partition(".")[0] == "vllm" or "(" in name]
        found |= {file: asked} if asked else {}
    compats = {file for file in found if file.startswith("compat/")}
    assert compats == {f"compat/{name}.py" for name in ("__init__", "alike", "v026", "v032")}
    rest = {file: names for file, names in found.items() if file not in compats}
    assert rest == {"hooks.py": ["import_module(hook.module)"], "versions.py": ["import_module('vllm')"]}


@pytest.fixture(scope="module")
def looked() -> dict[str, list[str]]:
    """What a process finds in vLLM before and after."""
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=os.environ, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_nothing_else_of_vllm_is_replaced(looked: dict[str, list[str]]) -> None:
    """Of all that is imported, whatever way it would have been replaced."""
    has_the_fault = compat.names().second_runner_with_the_fault() is not None
    expected = {name for where, name in REPLACED.items() if has_the_fault or where != ONLY_OLD}
    assert set(looked["replaced"]) == expected
    assert looked["added"] == list(MARK.values())
    assert looked["imported"] == []
