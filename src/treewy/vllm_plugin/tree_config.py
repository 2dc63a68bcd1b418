"""What trees need in vLLM's configuration, set where the user left it open and refused where another choice was made."""

from typing import Any

from treewy.errors import RequestError, UnsupportedError
from treewy.vllm_plugin import compat, tree_attention
from treewy.vllm_plugin.options import WIDTHS, Options, num_drafts
from treewy.vllm_plugin.synthetic import SYNTHETIC, depth_rates

# The attention backend of plugins, and the only one of a CPU, where ours stands in for it; by vLLM's names.
CUSTOM, ON_CPU = "CUSTOM", "CPU_ATTN"


def prepare(vllm_config: Any, options: Options, asked: bool) -> None:
    """Give an engine with trees its attention backend and graphs for every number of full trees.

    Args:
        vllm_config: vLLM's configuration, whole.
        options: The engine's.
        asked: Whether the user chose the sizes of captured graphs.

    Raises:
        RequestError: the sizes that the user chose leave full trees without a graph; a step has no room for them;
            synthetic acceptance is of longer paths than the tree's.
        UnsupportedError: another attention backend was chosen.
    """
    attention, on_gpu = vllm_config.attention_config, compat.platform() == "cuda"
    _check_attention(attention, CUSTOM if on_gpu else ON_CPU)
    if on_gpu:
        _take_attention(attention)
    speculative = vllm_config.speculative_config
    if speculative.rejection_sample_method == SYNTHETIC:
        depth_rates(speculative.synthetic_acceptance_rates, len(options.widths or ()))
    _check_draft_room(vllm_config.scheduler_config, options)
    _check_whole_tree(vllm_config.scheduler_config, options.longest_step)
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        _size_graphs(vllm_config, options.longest_step, asked)


def asked_sizes(arguments: Any) -> bool:
    """Return whether an `EngineArgs` says for which sizes graphs are captured."""
    compilation = arguments.compilation_config
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    return any(getattr(where, name, None) is not None for where in (arguments, compilation) for name in names)


def capture_sizes(largest: int, step_rows: int) -> list[int]:
    """Return the rows to capture graphs for: of 1, 2 and 4 full trees, then of every 8th number, of 64 on of every 16th."""
    counts = {*(1, 2, 4), *range(8, 64, 8), *range(64, largest, 16), largest}
    return sorted(count * step_rows for count in counts if count <= largest)


def _check_attention(attention: Any, ours: str) -> None:
    given = attention.backend
    if given is not None and given.name != ours:
        raise UnsupportedError(
            f"Attention over trees is a backend of its own; attention_backend is {given.name}. Leave it out, or leave {WIDTHS} "
            "out."
        )
    if attention.backend_per_kind:
        raise UnsupportedError(
            "Attention over trees is one backend for all layers; backend_per_kind of the attention config is "
            f"{attention.backend_per_kind}. Leave it out, or leave {WIDTHS} out."
        )


def _take_attention(attention: Any) -> None:
    vllm = compat.names()
    tree_attention.register(vllm, on_cpu=False)
    attention.backend = vllm.AttentionBackendEnum.CUSTOM


def _check_whole_tree(scheduler: Any, step_rows: int) -> None:
    """Check that some tree is ever verified whole: vLLM drops what a step has no tokens for."""
    if scheduler.max_num_batched_tokens < step_rows:
        raise RequestError(
            f"A step must have room for the whole tree of a request, {step_rows} rows; max_num_batched_tokens is "
            f"{scheduler.max_num_batched_tokens}. Set it to {step_rows} at least, better {scheduler.max_num_seqs * step_rows}."
        )


def _check_draft_room(scheduler: Any, options: Options) -> None:
    """Check that vLLM's drafter, which has buffers for one step's tokens, can run the levels above the last."""
    rows = num_drafts((options.widths or ())[:-1])
    needed = scheduler.max_num_seqs * rows
    if needed > scheduler.max_num_batched_tokens:
        raise RequestError(
            f"A step must have room for the drafts of all levels but the last of every request, {scheduler.max_num_seqs} x "
            f"{rows} rows; {_more_room(scheduler, rows)}"
        )


def _more_room(scheduler: Any, rows: int) -> str:
    """Return how many tokens a step may have, and what to set for `rows` of each request; fewer requests may not help."""
    tokens, needed = scheduler.max_num_batched_tokens, scheduler.max_num_seqs * rows
    fewer = f", or max_num_seqs to {tokens // rows} at most" if tokens >= rows else ""
    return f"max_num_batched_tokens is {tokens}. Set it to {needed} at least{fewer}."


def _size_graphs(vllm_config: Any, step_rows: int, asked: bool) -> None:
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    needed = scheduler.max_num_seqs * step_rows
    if needed > scheduler.max_num_batched_tokens:
        raise RequestError(
            f"A step must have room for the whole tree of every request, {scheduler.max_num_seqs} x {step_rows} rows; "
            f"{_more_room(scheduler, step_rows)}"
        )
    if not asked:
        compilation.cudagraph_capture_sizes = capture_sizes(scheduler.max_num_seqs, step_rows)
        compilation.max_cudagraph_capture_size = needed
        compilation.post_init_cudagraph_sizes()
    elif not _captures(compilation, needed, step_rows):
        raise RequestError(
            f"Full trees of all {scheduler.max_num_seqs} requests must have a captured graph, of {needed} rows; sizes are "
            f"{compilation.cudagraph_capture_sizes!s:.80}, the largest {compilation.max_cudagraph_capture_size}. Leave the sizes "
            f"out, or have {needed} among them."
        )


def _captures(compilation: Any, rows: int, step_rows: int) -> bool:
    """Return whether vLLM captures full trees of so many rows: it rounds sizes up to whole trees, and drops what is too many."""
    rounded = {-(-size // step_rows) * step_rows for size in compilation.cudagraph_capture_sizes}
    return rows in rounded and rows <= compilation.max_cudagraph_capture_size
