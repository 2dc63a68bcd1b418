"""How options reach vLLM's configuration: moved out of the speculative one, once, and refused in the front end."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from treewy.errors import RequestError, UnsupportedError
from treewy.vllm_plugin import compat, facts, intake, scrape, versions
from treewy.vllm_plugin.options import Options
from vllm_plugin.stand_in import config


class EngineArgs:
    """What is patched: as vLLM's, it fails on unknown keys and passes the rest on."""

    def __init__(self, speculative: Any = None, additional: Any = None, **changes: Any) -> None:
        self.speculative_config, self.additional_config, self.changes = speculative, additional, changes
        self.spec_tokens: int | None = None
        self.seen: list[Any] = []

    def create_speculative_config(self, target_model_config: Any, target_parallel_config: Any) -> Any:
        """As vLLM's."""
        self.seen.append((self.speculative_config, target_model_config, target_parallel_config))
        for key in self.speculative_config or ():
            if key.replace("-", "_") in {*intake.KEYS}:
                raise TypeError(f"{key}: Unexpected keyword argument")
        return self.speculative_config

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        """As vLLM's."""
        self.create_speculative_config(target_model_config="model", target_parallel_config="parallel")
        return config(**self.changes, additional_config=self.additional_config)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is shown among vLLM's metrics, or None where it is taken away, time after time."""
    calls: list[Any] = []
    monkeypatch.setattr(scrape, "show", lambda options, drafts: calls.append((options, drafts)))
    monkeypatch.setattr(scrape, "hide", lambda: calls.append(None))
    return calls


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch, shown: list[Any]) -> type[EngineArgs]:
    patched = type("EngineArgs", (EngineArgs,), dict(vars(EngineArgs)))
    monkeypatch.setattr(compat, "engine_arguments", lambda: patched)
    for module in (compat, facts):
        monkeypatch.setattr(module, "platform", lambda: "cpu")
    monkeypatch.setattr(versions, "installed", lambda: versions.Version(0, 32, 0))
    intake.install()
    return patched


def moved(speculative: Any, additional: Any = None, spec_tokens: int | None = None) -> SimpleNamespace:
    arguments = SimpleNamespace(speculative_config=speculative, additional_config=additional, spec_tokens=spec_tokens)
    intake.move_options(arguments)
    return arguments


@pytest.mark.parametrize("key", ["mamba_state_commit", "mamba-state-commit"])
def test_options_move(key: str) -> None:
    """Ours leave, the rest stays, and the caller's dictionaries are as they were."""
    speculative, additional = (
        {"method": "mtp", key: "ring", "ring_capacity": 8},
        {"other": 1, "treewy": {"check_every": 2}},
    )
    arguments = moved(speculative, additional)
    assert arguments.speculative_config == {"method": "mtp"}
    assert arguments.additional_config == {
        "other": 1,
        "treewy": {"check_every": 2, "mamba_state_commit": "ring", "ring_capacity": 8},
    }
    assert set(speculative) == {"method", key, "ring_capacity"}
    assert additional == {"other": 1, "treewy": {"check_every": 2}}


@pytest.mark.parametrize("speculative", [None, {}, {"method": "mtp"}])
@pytest.mark.parametrize("additional", [None, {}, {"treewy": {"mamba_state_commit": "ring"}}, object()])
def test_without_options_nothing_moves(speculative: Any, additional: Any) -> None:
    arguments = moved(speculative, additional)
    assert arguments.speculative_config is speculative
    assert arguments.additional_config is additional


def test_the_same_option_twice() -> None:
    """Fine if alike, refused if not."""
    ours = {"mamba_state_commit": "ring"}
    assert moved(ours, {"treewy": ours}).additional_config == {"treewy": ours}
    message = "mamba_state_commit is 'ring' in the speculative config and 'reconstruct' in additional_config['treewy']"
    with pytest.raises(RequestError, match=re.escape(message)):
        moved(ours, {"treewy": {"mamba_state_commit": "reconstruct"}})
    tree = ours | {"num_speculative_tokens": 6}
    moved(tree | {"draft_tree_widths": (2, 2)}, {"treewy": {"draft_tree_widths": [2, 2]}})  # a tuple is a list in JSON
    with pytest.raises(RequestError, match=re.escape("draft_tree_widths is (2, 2)")):
        moved(tree | {"draft_tree_widths": (2, 2)}, {"treewy": {"draft_tree_widths": [2, 3]}})


def test_the_same_option_in_two_spellings() -> None:
    """vLLM takes dashes for underscores, and would take the last one."""
    ours = {"mamba-state-commit": "ring", "mamba_state_commit": "ring"}
    assert moved(ours).additional_config == {"treewy": {"mamba_state_commit": "ring"}}
    with pytest.raises(
        RequestError, match=r"mamba_state_commit twice, with dashes .*: 'ring' and 'reconstruct'\. Drop"
    ):
        moved(ours | {"mamba_state_commit": "reconstruct"})


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [("check_every", True, 1), ("ring_capacity", 8.0, 8), ("draft_tree_widths", [2.0, 2], [2, 2])],
)
def test_a_bad_value_does_not_hide_behind_a_good_one(key: str, bad: Any, good: Any) -> None:
    ours = {"mamba_state_commit": "ring", "num_speculative_tokens": 6}
    for one, other in ((bad, good), (good, bad)):
        with pytest.raises(RequestError, match="given once, or twice alike"):
            moved(ours | {key: one}, {"treewy": {key: other}})


def test_keys_that_are_no_names_are_left_to_vllm() -> None:
    assert moved({3: "x"}).speculative_config == {3: "x"}
    assert moved({3: "x", "mamba_state_commit": "ring"}).speculative_config == {3: "x"}


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        (SimpleNamespace(), "need additional_config to be a dictionary; got a SimpleNamespace. Pass one."),
        ({"treewy": 3}, "additional_config['treewy'] must be a JSON object of options; got 3. Leave it out"),
    ],
)
def test_no_place_to_move_to(additional: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        moved({"mamba_state_commit": "ring"}, additional)


TREE = {"mamba_state_commit": "ring", "draft_tree_widths": [2, 2]}


@pytest.mark.parametrize("given", [{"num_speculative_tokens": 6}, {"num-speculative-tokens": 6}, {}])
def test_a_tree_is_counted_before_vllm_counts(given: dict[str, int]) -> None:
    """Where vLLM is told: in the speculative configuration or by the flag of its own."""
    assert moved(TREE | given, spec_tokens=None if given else 6).speculative_config == given
    wrong = dict.fromkeys(given, 7)
    with pytest.raises(RequestError, match=r'\[2, 2\] has 6, .* is (7|None)\. Pass "num_speculative_tokens": 6\.'):
        moved(TREE | wrong)


def test_bad_values_are_refused_before_vllm_sees_them() -> None:
    with pytest.raises(RequestError, match="must be one of store_all, reconstruct, ring; got 'x'"):
        moved({"mamba_state_commit": "x"})
    with pytest.raises(RequestError, match="check_every must be an integer of at least 0; got -1"):
        moved({"mamba_state_commit": "ring"}, {"treewy": {"check_every": -1}})


def test_a_configuration_has_the_options(engine_args: type[EngineArgs]) -> None:
    arguments = engine_args({"method": "mtp", "mamba_state_commit": "reconstruct"})
    for _ in range(2):  # a front end may ask twice
        made = arguments.create_engine_config(headless=True)
        assert made.additional_config == {"treewy": {"mamba_state_commit": "reconstruct"}}
        assert arguments.seen[-1] == ({"method": "mtp"}, "model", "parallel")


@pytest.mark.parametrize("sizes", [None, [1, 2]])
def test_what_trees_need_is_set(
    engine_args: type[EngineArgs], sizes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the whole configuration, and only for trees; whether graphs were asked for is known from the arguments alone."""
    prepared: list[Any] = []
    monkeypatch.setattr(intake, "prepare", lambda config, options, asked: prepared.append((config, options, asked)))
    drafts = {"speculative__num_speculative_tokens": 6}
    arguments = engine_args({"method": "mtp", "num_speculative_tokens": 6} | TREE, **drafts)
    arguments.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes)
    made = arguments.create_engine_config()
    assert prepared == [(made, Options("ring", (2, 2)), sizes is not None)]
    engine_args({"method": "mtp", "mamba_state_commit": "ring"}).create_engine_config()
    assert len(prepared) == 1


def test_metrics_are_those_of_the_options(engine_args: type[EngineArgs], shown: list[Any]) -> None:
    engine_args({"method": "mtp", "mamba_state_commit": "ring"}).create_engine_config()
    for speculative in ({"method": "mtp"}, {"mamba_state_commit": "store_all"}, None):
        engine_args(speculative).create_engine_config()
    assert shown == [(Options("ring"), 3), None, None, None]
    with pytest.raises(RequestError):
        engine_args({"mamba_state_commit": "x"}).create_engine_config()
    assert len(shown) == 4


def test_installing_again_changes_nothing(engine_args: type[EngineArgs]) -> None:
    """One method is wrapped, once."""
    wrapped = engine_args.create_engine_config
    intake.install()
    assert engine_args.create_engine_config is wrapped is not EngineArgs.create_engine_config
    assert wrapped.__doc__ == "As vLLM's."
    others = {name: value for name, value in vars(EngineArgs).items() if name != "create_engine_config"}
    assert others.items() <= vars(engine_args).items()


def test_what_cannot_run_is_refused_in_the_front_end(engine_args: type[EngineArgs]) -> None:
    """Fault L09: with options; without them the same configuration is vLLM's business."""
    changes = {"use_v2_model_runner": False, "cache__mamba_cache_mode": "align"}
    assert engine_args({"method": "mtp"}, **changes).create_engine_config() is not None
    assert engine_args({"mamba_state_commit": "store_all"}, **changes).create_engine_config() is not None
    with pytest.raises(UnsupportedError, match=r"runs on V1\. On a CPU, .*, pass --no-enable-prefix-caching \(in"):
        engine_args({"mamba_state_commit": "reconstruct"}, **changes).create_engine_config()
    with pytest.raises(RequestError, match="must be one of store_all, reconstruct, ring; got 'x'"):
        engine_args({"mamba_state_commit": "x"}).create_engine_config()


def test_another_version_is_refused_only_with_options(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault L10: options that nothing would carry out are not taken."""
    monkeypatch.setattr(versions, "installed", lambda: versions.Version(0, 99, 0))
    assert engine_args({"method": "mtp"}).create_engine_config() is not None
    with pytest.raises(UnsupportedError, match=r"0\.99\.0 is installed"):
        engine_args(None, {"treewy": {"mamba_state_commit": "ring"}}).create_engine_config()
