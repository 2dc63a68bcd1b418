"""Installs the plugin and both runners' wrappers in a process of its own, and prints what vLLM's names refer to since.

    python replaced.py

prints "replaced" and "added": attributes of modules and classes of vLLM, as "module:name"; and "imported": modules of vLLM
that were not looked at, since only then somebody wanted them.
"""

import json
import sys
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules
from typing import Any


def main() -> None:
    """Look, install, and look again."""
    import_what_is_touched()
    modules, before = names(), attributes(names())
    install()
    after = attributes(modules)
    answer = {
        "replaced": [name for name, value in after.items() if name in before and before[name] is not value],
        "added": [name for name in after if name not in before],
        "imported": sorted(names() - modules),
    }
    print(json.dumps(answer))


def import_what_is_touched() -> None:
    """Import the plugin and every module of vLLM that it knows of, also those that it imports only where they run."""
    import treewy.vllm_plugin as plugin
    from treewy.vllm_plugin import compat, hooks, versions

    for module in iter_modules(plugin.__path__, f"{plugin.__name__}."):
        import_module(module.name)
    for hook in hooks.of_version(versions.installed()[:2]):
        if not hook.gpu:
            hooks.resolve(hook)
    vllm = compat.names()
    for borrow in (compat.engine_arguments, compat.platform, vllm.first_runner_class, vllm.cpu_attention):
        borrow()


def install() -> None:
    """Do what the entry point does, and an engine's first layer under either runner."""
    from treewy import vllm_plugin
    from treewy.vllm_plugin import compat, first_runner, second_runner, tree_attention

    vllm_plugin.register()
    vllm = compat.names()
    first_runner.wrap(vllm, object())
    second_runner.run_prompts_eagerly(vllm, 4)
    tree_attention.register(vllm, on_cpu=True)


def names() -> set[str]:
    """Return the modules of vLLM that are imported."""
    return {name for name in sys.modules if name.partition(".")[0] == "vllm"}


def attributes(modules: set[str]) -> dict[str, Any]:
    """Return what every name in the modules and their classes refers to."""
    found: dict[str, Any] = {}
    for module in sorted(modules):
        for name, value in list(vars(sys.modules[module]).items()):
            found[f"{module}:{name}"] = value
            if isclass(value) and value.__module__ == module:
                found |= {f"{module}:{name}.{member}": of_class for member, of_class in list(vars(value).items())}
    return found


if __name__ == "__main__":
    main()
