"""How many sequences fit by commit policy, what bounds them, and whether treewy's policies are worth it."""

from dataclasses import asdict, dataclass
from typing import Any

from treewy.errors import RequestError
from treewy.planner import vllm
from treewy.planner.advice import advise
from treewy.planner.catalogue import GIB, GPU
from treewy.planner.memory import POLICIES, RING_CAPACITY, PerSequence, per_sequence
from treewy.planner.model import ModelSpec
from treewy.planner.source import Source

# Kept free on each GPU for what is counted nowhere else: activations, the context of CUDA, graphs, fragmentation.
# docs/planning.md has what one engine was seen to take.
RESERVE_GIB = 3.0
MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class Setting:
    """What to plan for.

    Attributes:
        rows: Rows of the draft tree, root included; 1 drafts nothing.
        context: Committed tokens of every sequence.
        tp: GPUs the model is spread over.
        dtype: Of weights, windows, keys and values.
        state_dtype: Of recurrent states; None for the checkpoint's choice.
        requests: Requests wanted at once, if known.
        memory_fraction: Part of each GPU's memory that may be used.
        reserve_gib: Of that part, what stays free for everything but weights and sequences.
        ring_capacity: Accepted rows that `ring` keeps.
    """

    rows: int = 4
    context: int = 32768
    tp: int = 1
    dtype: str = "bfloat16"
    state_dtype: str | None = None
    requests: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    reserve_gib: float = RESERVE_GIB
    ring_capacity: int = RING_CAPACITY

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise RequestError(
                f"The memory fraction must be above 0 and at most 1; got {self.memory_fraction}. Use 0.9, say."
            )
        # Beyond any memory; larger figures would not fit a float of bytes.
        if not 0 <= self.reserve_gib <= 1 << 20:
            raise RequestError(f"The reserve must be 0 to {1 << 20} GiB; got {self.reserve_gib}. Use 3, say.")
        if self.requests is not None and self.requests < 1:
            raise RequestError(f"Wanted requests must be at least 1; got {self.requests}. Leave them out if unknown.")


@dataclass(frozen=True)
class Plan:
    """The arithmetic's outcome. All bytes but `weights_bytes` are of one GPU.

    Attributes:
        per_sequence: Bytes of a sequence, part by part.
        totals: Bytes of a sequence by policy.
        weights_bytes: The whole model's, with the head if it drafts.
        budget_bytes: What weights and reserve leave to sequences, by policy; negative if they do not fit.
        fits: Requests by policy.
        regime: "weights do not fit", "not memory-bound", "state-bound" or "kv-bound".
        advice: What to do, in plain words.
        vllm: vLLM's own arithmetic by policy; None where weights do not fit.
    """

    model: str
    source: str
    gpu: GPU
    setting: Setting
    state_dtype: str
    per_sequence: PerSequence
    totals: dict[str, int]
    weights_bytes: int
    weights_source: str
    budget_bytes: dict[str, int]
    fits: dict[str, int]
    regime: str
    advice: str
    vllm: dict[str, dict[str, int]] | None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self) | {"per_sequence": self.per_sequence._asdict()}


def make_plan(model: Source, gpu: GPU, setting: Setting) -> Plan:
    """Return what fits.

    Raises:
        RequestError: a setting is out of range, or the model's heads do not divide over the GPUs.
    """
    shard = model.spec.shard(setting.tp)
    state_dtype = setting.state_dtype or model.spec.state_dtype
    memory = per_sequence(
        shard,
        rows=setting.rows,
        context=setting.context,
        dtype=setting.dtype,
        state_dtype=state_dtype,
        ring_capacity=setting.ring_capacity,
    )
    totals = memory.totals()
    drafting_weights = model.weights.target + (model.weights.head if setting.rows > 1 else 0)
    weights = dict.fromkeys(POLICIES, drafting_weights) | {"none": model.weights.target}
    usable = int(gpu.memory_bytes * setting.memory_fraction) - int(setting.reserve_gib * GIB)
    budget = {policy: usable - -(-weights[policy] // setting.tp) for policy in POLICIES}
    fits = {policy: max(0, budget[policy] // totals[policy]) for policy in POLICIES}
    whole = budget["store_all"] >= 0
    regime = _regime(memory, totals, fits, setting) if whole else "weights do not fit"
    return Plan(
        model=model.name,
        source=model.source,
        gpu=gpu,
        setting=setting,
        state_dtype=state_dtype,
        per_sequence=memory,
        totals=totals,
        weights_bytes=drafting_weights,
        weights_source=model.weights.source,
        budget_bytes=budget,
        fits=fits,
        regime=regime,
        advice=advise(
            memory,
            fits,
            rows=setting.rows,
            requests=setting.requests,
            short=-budget["store_all"],
            has_head=model.spec.num_head_layers > 0,
            beyond=max(0, setting.context - model.spec.max_len),
        ),
        vllm=_vllm(shard, budget, setting, state_dtype) if whole else None,
    )


def _regime(memory: PerSequence, totals: dict[str, int], fits: dict[str, int], setting: Setting) -> str:
    if setting.requests is not None and fits["store_all"] >= setting.requests:
        return "not memory-bound"
    grows_with_context = memory.kv + memory.draft_kv
    return "kv-bound" if 2 * grows_with_context > totals["store_all"] else "state-bound"


def _vllm(shard: ModelSpec, budget: dict[str, int], setting: Setting, state_dtype: str) -> dict[str, dict[str, int]]:
    report = {}
    for policy in POLICIES:
        blocks = vllm.layout(
            shard,
            policy,
            drafts=setting.rows - 1,
            dtype=setting.dtype,
            state_dtype=state_dtype,
            ring_capacity=setting.ring_capacity,
        )
        num_blocks = blocks.num_blocks(budget[policy])
        report[policy] = {
            "block_size": blocks.block_size,
            "page_bytes": blocks.page_bytes,
            "num_blocks": num_blocks,
            "blocks_per_request": blocks.blocks_per_request(setting.context),
            "kv_tokens": blocks.kv_tokens(num_blocks, setting.context),
            "requests": blocks.requests(num_blocks, setting.context),
        }
    return report
