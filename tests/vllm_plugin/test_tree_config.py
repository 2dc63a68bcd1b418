"""What trees set in vLLM's configuration, and which choices of the user they cannot run with."""

from types import SimpleNamespace
from typing import Any

import pytest

from treewy.errors import RequestError, UnsupportedError
from treewy.vllm_plugin import compat, tree_attention, tree_config
from treewy.vllm_plugin.options import Options
from treewy.vllm_plugin.tree_config import asked_sizes, capture_sizes, prepare
from vllm_plugin.stand_in import config

TREE = Options("reconstruct", (2, 2))
ROWS = 7
OURS = SimpleNamespace(name="CUSTOM")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have a GPU; return what vLLM is told of backends."""
    told: list[Any] = []
    names = SimpleNamespace(AttentionBackendEnum=SimpleNamespace(CUSTOM=OURS))
    monkeypatch.setattr(compat, "platform", lambda: "cuda")
    monkeypatch.setattr(compat, "names", lambda: names)
    monkeypatch.setattr(tree_attention, "register", lambda vllm, *, on_cpu: told.append((vllm is names, on_cpu)))
    return told


def engine(*, requests: int = 4, tokens: int = 2048, full: bool = True, backend: str | None = None) -> Any:
    """Return a configuration that trees run with."""
    whole = config()
    whole.compilation_config = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full),
        cudagraph_capture_sizes=[1, 2, 4],
        max_cudagraph_capture_size=4,
        calls=0,
    )

    def post_init_cudagraph_sizes() -> None:
        assert (
            whole.compilation_config.cudagraph_capture_sizes[-1] == whole.compilation_config.max_cudagraph_capture_size
        )
        whole.compilation_config.calls += 1

    whole.compilation_config.post_init_cudagraph_sizes = post_init_cudagraph_sizes
    whole.scheduler_config = SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens)
    given = None if backend is None else SimpleNamespace(name=backend)
    whole.attention_config = SimpleNamespace(backend=given, backend_per_kind={})
    return whole


@pytest.mark.parametrize(
    ("largest", "counts"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (9, [1, 2, 4, 8, 9]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (100, [1, 2, 4, *range(8, 64, 8), 64, 80, 96, 100]),
    ],
)
def test_graphs_are_for_numbers_of_full_trees(largest: int, counts: list[int]) -> None:
    """Up to all requests, whatever their number."""
    assert capture_sizes(largest, ROWS) == [ROWS * count for count in counts]


def test_sizes_are_set_where_they_were_left_open(registered: list[Any]) -> None:
    """With what vLLM derives from them, which is made anew."""
    whole = engine()
    prepare(whole, TREE, asked=False)
    compilation = whole.compilation_config
    assert compilation.cudagraph_capture_sizes == [7, 14, 28]
    assert (compilation.max_cudagraph_capture_size, compilation.calls) == (28, 1)


def test_sizes_of_the_user_stay(registered: list[Any]) -> None:
    whole = engine()
    with pytest.raises(
        RequestError, match=r"all 4 requests .* of 28 rows; sizes are .*1, 2, 4.* largest 4\. Leave the sizes"
    ):
        prepare(whole, TREE, asked=True)
    whole.compilation_config.max_cudagraph_capture_size = 28
    whole.compilation_config.cudagraph_capture_sizes = [1, 28]
    prepare(whole, TREE, asked=True)
    assert (whole.compilation_config.cudagraph_capture_sizes, whole.compilation_config.calls) == ([1, 28], 0)


def test_without_whole_graphs_there_are_no_sizes(registered: list[Any]) -> None:
    whole = engine(full=False, tokens=8)
    prepare(whole, TREE, asked=False)
    prepare(whole, TREE, asked=True)
    assert (whole.compilation_config.cudagraph_capture_sizes, whole.compilation_config.calls) == ([1, 2, 4], 0)


def test_a_step_must_have_room_for_all_trees(registered: list[Any]) -> None:
    prepare(engine(tokens=28), TREE, asked=False)
    with pytest.raises(RequestError, match=r"4 x 7 rows; max_num_batched_tokens is 27\. Set it to 28 .* to 3 at most"):
        prepare(engine(tokens=27), TREE, asked=False)


def test_without_graphs_a_step_must_have_room_for_one(registered: list[Any]) -> None:
    """Else vLLM would cut every tree, and nobody would say so."""
    prepare(engine(requests=2, tokens=7, full=False), TREE, asked=False)
    with pytest.raises(RequestError, match=r"7 rows; max_num_batched_tokens is 6\. Set it to 7 at least, better 14"):
        prepare(engine(requests=2, tokens=6, full=False), TREE, asked=False)


@pytest.mark.parametrize("backend", [None, "CUSTOM"])
def test_a_gpu_has_our_attention(registered: list[Any], backend: str | None) -> None:
    whole = engine(backend=backend)
    prepare(whole, TREE, asked=False)
    assert registered == [(True, False)]
    assert whole.attention_config.backend is OURS


@pytest.mark.parametrize(
    ("platform", "backend"),
    [("cuda", "FLASHINFER"), ("cuda", "CPU_ATTN"), ("cpu", "FLASH_ATTN"), ("cpu", "CUSTOM")],
)
def test_another_attention_is_refused(
    registered: list[Any], platform: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault G06: at the start, and never run as a chain; also where it is ours on another platform."""
    monkeypatch.setattr(tree_config.compat, "platform", lambda: platform)
    whole = engine(backend=backend)
    message = rf"attention_backend is {backend}\. Leave it out, or leave draft_tree"
    with pytest.raises(UnsupportedError, match=message):
        prepare(whole, TREE, asked=False)
    assert registered == []
    assert whole.attention_config.backend.name == backend


def test_a_cpu_keeps_its_own(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one only; ours stands in for it where layers are made."""
    monkeypatch.setattr(tree_config.compat, "platform", lambda: "cpu")
    whole = engine(backend="CPU_ATTN")
    prepare(whole, TREE, asked=False)
    assert registered == []
    assert whole.attention_config.backend.name == "CPU_ATTN"


@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size"])
@pytest.mark.parametrize("where", ["arguments", "compilation_config"])
def test_what_the_user_asked_for(name: str, where: str) -> None:
    """By a flag of its own, or in the compilation config."""
    arguments = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=None))
    assert not asked_sizes(arguments)
    vars(arguments if where == "arguments" else arguments.compilation_config)[name] = [1] if name[0] == "c" else 1
    assert asked_sizes(arguments)
