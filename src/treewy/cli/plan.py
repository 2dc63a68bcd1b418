"""`treewy plan`: what a sequence takes by commit policy, how many fit, and whether it is worth it."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from treewy.planner import MEMORY_FRACTION, RESERVE_GIB, RING_CAPACITY, Setting, find_gpu, find_model, make_plan
from treewy.planner import Plan as Outcome
from treewy.planner.advice import humanise

PARTS = {
    "state": "recurrent states",
    "conv": "convolution windows",
    "kv": "keys and values",
    "draft_kv": "drafter's KV",
    "pending_kv": "rows' KV",
    "conv_inputs": "rows' conv inputs",
    "snapshots": "pending states",
    "records": "pending records",
    "history": "ring's history",
}
HELD_BY = {
    "none": ("state", "conv", "kv"),
    "store_all": ("state", "conv", "kv", "draft_kv", "pending_kv", "conv_inputs", "snapshots"),
    "reconstruct": ("state", "conv", "kv", "draft_kv", "pending_kv", "conv_inputs", "records"),
    "ring": ("state", "conv", "kv", "draft_kv", "pending_kv", "conv_inputs", "records", "history"),
}


@dataclass(frozen=True)
class Plan:
    """Say how much memory a sequence takes by commit policy, how many requests fit, and whether it is worth it."""

    model: Annotated[str, arg(metavar="DIR_OR_HUB_ID_OR_PRESET")]
    """Preset such as qwen3.5-35b-a3b, checkpoint folder or hub id; only sizes are read, no weights."""
    gpu: Annotated[str, arg(metavar="NAME_OR_GIB")] = "h200"
    """GPU such as h200, or its memory in GiB."""
    tp: int = 1
    """GPUs the model is spread over (tensor parallelism)."""
    context: int = 32768
    """Committed tokens of every request."""
    tree: Annotated[str | None, arg(metavar="WIDTHS")] = None
    """Draft tree by children per level, as in 3,3,3."""
    chain: Annotated[int | None, arg(metavar="INT")] = None
    """Draft chain of this many tokens; 0 drafts nothing. Left out: 3, unless there is a tree."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights, windows, keys and values."""
    state_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of recurrent states. auto: what the checkpoint asks for."""
    requests: Annotated[int | None, arg(metavar="INT")] = None
    """Requests you want at once, if you know."""
    memory_fraction: float = MEMORY_FRACTION
    """Part of each GPU's memory that may be used."""
    reserve: Annotated[float, arg(metavar="GIB")] = RESERVE_GIB
    """Of that part, GiB kept for activations and everything else that is not counted."""
    ring_capacity: int = RING_CAPACITY
    """Accepted rows that the ring policy keeps."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object."""

    def run(self) -> None:
        """Run the command."""
        outcome = self.plan()
        if self.json:
            print(json.dumps(outcome.to_json()))
        else:
            _print(outcome)

    def plan(self) -> Outcome:
        """Return the plan that the options ask for."""
        from treewy.draft.shape import parse_shape

        shape = parse_shape(tree=self.tree, chain=self.chain)
        setting = Setting(
            rows=shape.num_rows,
            context=self.context,
            tp=self.tp,
            dtype=self.dtype,
            state_dtype=None if self.state_dtype == "auto" else self.state_dtype,
            requests=self.requests,
            memory_fraction=self.memory_fraction,
            reserve_gib=self.reserve,
            ring_capacity=self.ring_capacity,
        )
        gpu = find_gpu(self.gpu)
        return make_plan(find_model(self.model, self.dtype), gpu, setting)


def _print(outcome: Outcome) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    s = outcome.setting
    console = Console(highlight=False)
    gpus = outcome.gpu.name if s.tp == 1 else f"{s.tp} x {outcome.gpu.name}, each"
    console.print(f"{outcome.model} on {gpus} ({humanise(outcome.gpu.memory_bytes)})")
    console.print(
        f"{s.context} tokens a request, {s.rows - 1} drafts a step, {s.dtype}, states in {outcome.state_dtype}; weights "
        f"{humanise(outcome.weights_bytes)} ({outcome.weights_source}); {s.memory_fraction:g} of the memory, "
        f"{s.reserve_gib:g} GiB of it in reserve"
    )
    table = Table("one sequence, one GPU", *outcome.totals, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    figures = outcome.per_sequence._asdict()
    figures["records"] = figures["stash"] - figures["conv_inputs"]
    for part, label in PARTS.items():
        table.add_row(label, *(humanise(figures[part]) if part in HELD_BY[policy] else "" for policy in outcome.totals))
    table.add_section()
    table.add_row("total", *(humanise(total) for total in outcome.totals.values()))
    table.add_row("requests that fit", *(str(count) for count in outcome.fits.values()))
    if outcome.vllm:
        table.add_row("by vLLM's blocks", *(str(outcome.vllm[policy]["requests"]) for policy in outcome.totals))
    console.print(table)
    console.print(f"Regime: {outcome.regime}.")
    console.print(outcome.advice)
