"""Where options enter: the method of vLLM's `EngineArgs` that every front end builds its configuration with.

vLLM's speculative configuration refuses keys that it does not know, so before it is made ours are moved from there to where
vLLM keeps what plugins need, `additional_config["treewy"]`; from there they reach every process. When it is made the
configuration is whole, in the process that the user started: what cannot run is refused there, before a model is loaded,
and what trees need is set.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from treewy.errors import RequestError
from treewy.vllm_plugin import compat, scrape, versions
from treewy.vllm_plugin.options import KEYS, SECTION, options_of, parse
from treewy.vllm_plugin.refusals import check_tree_size, refuse
from treewy.vllm_plugin.tree_config import asked_sizes, prepare

# What marks a method that is wrapped already: a process may register more than once.
MARK = "_wrapped_by_treewy"
DRAFTS = "num_speculative_tokens"


def install() -> None:
    """Wrap the method, once per process."""
    arguments = compat.engine_arguments()
    create = arguments.create_engine_config
    if not hasattr(create, MARK):
        arguments.create_engine_config = _taking_options(create)


def move_options(arguments: Any) -> None:
    """Move the plugin's keys from the speculative configuration of an `EngineArgs` into its `additional_config`.

    Neither dictionary is changed in place: they are the caller's. What is wrong with ours is said here, before vLLM finds
    fault with what we make of it.

    Raises:
        RequestError: a key is in both with different values, or there is no place to move it to; a value is bad; a tree has
            another number of drafts than vLLM is told.
    """
    speculative = arguments.speculative_config
    if not isinstance(speculative, Mapping):
        return
    ours = _given_once(speculative)
    if not ours:
        return
    additional = {} if arguments.additional_config is None else arguments.additional_config
    if not isinstance(additional, Mapping):
        raise RequestError(
            f"Options of treewy need additional_config to be a dictionary; got a {type(additional).__name__}. Pass one."
        )
    section = additional.get(SECTION)
    section = {} if section is None else section
    _check_agreement(ours, section)
    moved = {**additional, SECTION: {**section, **ours}}
    rest = {key: value for key, value in speculative.items() if _name(key) not in KEYS}
    drafts = next((value for key, value in rest.items() if _name(key) == DRAFTS), arguments.spec_tokens)
    check_tree_size(parse(moved), drafts)
    arguments.speculative_config, arguments.additional_config = rest, moved


def _name(key: Any) -> Any:
    """Return a key of the speculative configuration as vLLM takes it: dashes for underscores."""
    return key.replace("-", "_") if isinstance(key, str) else key


def _given_once(speculative: Mapping[Any, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for key, value in speculative.items():
        name = _name(key)
        if name in ours and not _alike(ours[name], value):
            raise RequestError(
                f"An option must be given once, or twice alike; the speculative config has {name} twice, with dashes and with "
                f"underscores: {ours[name]!r:.80} and {value!r:.80}. Drop one."
            )
        if name in KEYS:
            ours[name] = value
    return ours


def _check_agreement(ours: Mapping[str, Any], section: Any) -> None:
    if not isinstance(section, Mapping):
        raise RequestError(
            f"additional_config[{SECTION!r}] must be a JSON object of options; got {section!r:.80}. Leave it out: the "
            "speculative config has options already."
        )
    for key, value in ours.items():
        if key in section and not _alike(section[key], value):
            raise RequestError(
                f"An option must be given once, or twice alike; {key} is {value!r:.80} in the speculative config and "
                f"{section[key]!r:.80} in additional_config[{SECTION!r}]. Drop one."
            )


def _alike(value: Any, other: Any) -> bool:
    """Return whether two values are one as JSON, where 1 is not true, nor 1.0, and a tuple is a list."""
    return _as_json(value) == _as_json(other)


def _as_json(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _taking_options(create: Callable) -> Callable:
    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        move_options(self)
        config = create(self, *args, **kwargs)
        options = options_of(config)
        if options.active:
            versions.check(on_cpu=compat.platform() == "cpu")
            refuse(config, options)
            if options.widths is not None:
                prepare(config, options, asked_sizes(self))
            scrape.show(options, config.speculative_config.num_speculative_tokens)
        else:
            scrape.hide()
        return config

    setattr(create_engine_config, MARK, True)
    return create_engine_config
