"""What tests look at inside a worker: functions that `engine.Run.probe` names."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def surroundings(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return what a worker runs in.

    plugin: whether treewy's plugin was loaded. kernels: what runs a Triton kernel that the model runner for GPUs launches.
    annotated, warned: whether a call that breaks an annotation of treewy fails, and a warning of treewy.
    """
    from vllm.v1.worker.gpu.input_batch import _prepare_pos_seq_lens_kernel

    kernel = type(_prepare_pos_seq_lens_kernel)
    return lambda: {
        "plugin": "treewy.vllm_plugin" in sys.modules,
        "kernels": f"{kernel.__module__}.{kernel.__qualname__}",
        "annotated": fails(lambda: import_module("treewy.tree").DraftTree.chain("three")),
        "warned": fails(lambda: warnings.warn_explicit("a warning", UserWarning, "tree.py", 1, module="treewy.tree")),
    }


def fails(call: Callable[[], object]) -> str | None:
    """Return what a call raises, if anything."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def hide_the_plugin() -> None:
    """Make the plugin fail to import; not a probe, but something to `prepare`."""
    sys.modules["treewy.vllm_plugin"] = None  # pyright: ignore[reportArgumentType]


def chains(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return what the plugin did since the last call: how many rows each request may keep and does, and what was checked.

    The latter is `Checker.report`, where states are. "counted" is what the plugin's metrics say, since the engine began.
    """
    from treewy.vllm_plugin.metrics import read

    shared = shared_of(worker)

    def look() -> dict[str, Any]:
        checker, memory = shared.checker, shared.memory
        report = {"lengths": memory.lengths.tolist(), "kept_rows": memory.sizes.kept_rows, "counted": read(worker)}
        if checker is not None:
            report |= checker.report()
            checker.num_checks, checker.largest = 0, 0.0
        return report

    return look


def trees(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `poisoned`, and beside it what each step did with each draft.

    "paths" has, per request and step that had drafts, how many rows the step verified and which it accepted, the root
    first and as places in the tree. "ahead" says whether steps are scheduled before the one before them is known.
    """
    sample_in_torch()
    return _noting_paths(worker, poisoned(worker))


def drafts(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `trees`, and beside it "drafts": by request, the tokens that each of its steps drafted for the next."""
    look, drafter, drafted = trees(worker), worker.model_runner.speculator, {}
    propose = drafter.propose

    def propose_and_note(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = propose(batch, *args, **kwargs)
        for name, row in zip(batch.req_ids, tokens.tolist(), strict=True):
            drafted.setdefault(name.partition("-")[0], []).append(row)
        return tokens

    drafter.propose = propose_and_note

    def look_at_drafts() -> dict[str, Any]:
        found = look() | {"drafts": dict(drafted)}
        drafted.clear()
        return found

    return look_at_drafts


def tree_boundaries(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `boundaries`, and beside it what `trees` has."""
    return _noting_paths(worker, boundaries(worker))


def _noting_paths(worker: Any, look: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    shared = shared_of(worker)
    finish, paths = shared.step.finish, []

    def finish_and_note(*args: Any) -> Any:
        tables, sizes = shared.step.tables, shared.step.drafted.sizes.tolist()
        packed = finish(*args)
        if packed is not None:
            local = (packed.rows - tables.tree.cu_rows[: len(sizes), None]).tolist()
            steps = zip(sizes, local, packed.lengths.tolist(), strict=True)
            paths.extend([size, path[:length]] for size, path, length in steps if size > 1)
        return packed

    shared.step.finish = finish_and_note

    def look_at_paths() -> dict[str, Any]:
        found = look() | {"paths": list(paths), "ahead": worker.vllm_config.scheduler_config.async_scheduling}
        paths.clear()
        return found

    return look_at_paths


def shared_of(worker: Any) -> Any:
    """Return what the plugin's layers share."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return next(layer.treewy for layer in layers if getattr(layer, "treewy", None) is not None)


def poisoned(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `wiped`, where grammars work, too."""
    mask_grammars_in_torch()
    return wiped(worker)


def wiped(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `chains`, which after each round fills all memory that nobody owns then with NaN; the next round meets it."""
    look = chains(worker)

    def look_and_poison() -> dict[str, Any]:
        poison(worker)
        return look()

    return look_and_poison


def boundaries(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return `chains`, in memory that is poisoned once, and beside it how states at block boundaries changed.

    "boundaries" has, for each of the two requests of a round, how far its state at the end of its second block is from
    the nearest of the first round: relative, in the Frobenius norm, of the worst layer.
    """
    poison(worker)
    look, runner = chains(worker), worker.model_runner
    first: list[list[torch.Tensor]] = []
    requests, places = runner.req_states, []
    add = requests.add_request

    def add_and_note(*, req_id: str, **kwargs: Any) -> None:
        add(req_id=req_id, **kwargs)
        places.append(requests.req_id_to_index[req_id])

    requests.add_request = add_and_note

    def states() -> list[list[torch.Tensor]]:
        groups = enumerate(runner.kv_cache_config.kv_cache_groups)
        tables = {name: runner.block_tables.block_tables[i].gpu for i, group in groups for name in group.layer_names}
        layers = runner.model_state.treewy_layers
        pages = [(layer.kv_cache[1], tables[layer.prefix]) for layer in layers]
        return [[state[table[place, 1].long()].clone() for state, table in pages] for place in places[-2:]]

    def look_at_boundaries() -> dict[str, Any]:
        now = states()
        first.extend(now if not first else [])
        off = [min(_distance(here, there) for there in first) for here in now]
        return look() | {"boundaries": off}

    return look_at_boundaries


def _distance(here: list[torch.Tensor], there: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(here, there, strict=True))


# As two bytes each: not a number in bfloat16, and twice in a row not one in float32; and some 32,800 in both.
NOT_A_NUMBER, LARGE = 0x7FC0, 0x4700


def poison(worker: Any) -> None:
    """Fill every page but those of vLLM's null block, and all rows of the plugin, kept ones and a step's, with NaN.

    On GPUs pages get large numbers: attention there is not ours, and may weigh what lies behind a sequence's end with 0.
    """
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    pages = [part for layer in layers for part in _parts(layer)]
    # Padding is written there and read from there, by requests that are none.
    null = [part[0].clone() for part in pages]
    for storage in {part.untyped_storage().data_ptr(): part.untyped_storage() for part in pages}.values():
        filler = NOT_A_NUMBER if storage.device.type == "cpu" else LARGE
        torch.empty(0, dtype=torch.int16, device=storage.device).set_(storage).fill_(filler)
    for part, kept in zip(pages, null, strict=True):
        part[0] = kept
    memory = shared_of(worker).memory
    for part in (*memory.step, *memory.kept[:4]):
        part.fill_(float("nan"))


def sample_in_torch() -> None:
    """Stand in for what of sampling Triton's interpreter refuses: masks of grammars, and `top_k` and `top_p`."""
    mask_grammars_in_torch()
    import_module("vllm.v1.sample.ops.topk_topp_sampler").HAS_TRITON = False


def mask_grammars_in_torch() -> None:
    """Stand in for the one kernel of grammars: Triton's interpreter refuses its masks."""
    import_module("vllm.v1.worker.gpu.structured_outputs")._apply_grammar_bitmask_kernel = _GrammarMask()


class _GrammarMask:
    """Takes the kernel's arguments."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.apply

    @staticmethod
    def apply(
        logits: torch.Tensor,
        logits_stride: int,
        places: torch.Tensor,
        cu_num_logits: torch.Tensor,
        allowed: torch.Tensor,
        allowed_stride: int,
        vocab_size: int,
        *,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,
    ) -> None:
        """Make tokens impossible whose bits are not set."""
        tokens = torch.arange(vocab_size)
        for bits, place in zip(allowed, places.tolist(), strict=True):
            row, position = divmod(place, MASK_STRIDE)
            start, end = cu_num_logits[row : row + 2].tolist()
            if position < end - start:
                logits[start + position, ((bits[tokens // 32] >> (tokens % 32)) & 1) == 0] = -float("inf")


def _parts(layer: Any) -> list[torch.Tensor]:
    cache = getattr(layer, "kv_cache", ())
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)
