"""Warmup compiles what steps launch: the variants of kernels that Triton would tell apart, without compiling any."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import treewy.ops
from ops.buckets import Bucket
from ops.whole_step import Sizes, WholeStep
from treewy.errors import BackendError
from treewy.ops import Facts, accept, conv, gdn, warmup
from treewy.ops import tree as trees
from treewy.ops.attention.kernels import geometry
from treewy.ops.gdn import ledger
from treewy.ops.gdn.cuda import entry
from treewy.ops.gdn.cuda.variant import kernel as compiled_variant
from treewy.ops.launch import LAUNCHES, name_of
from treewy.ops.warmup import ROOMS
from treewy.tree import DraftTree

OPS = Path(treewy.ops.__file__).parent
H200 = geometry.Gpu(shared=227 * 1024, num_sms=132)

# Kernels of entries that check slots on the host, so that no captured step has them.
UNCAPTURED = {"gdn_lengths"}

# Modules of device functions, and of kernels that a room launches.
DEVICE_FUNCTIONS = {
    *("accept.drawing", "accept.philox", "accept.vocabulary", "accept.walking"),
    *("attention.kernels.merge", "attention.kernels.moves", "attention.kernels.parts"),
    *("attention.kernels.prefix", "attention.kernels.softmax", "attention.kernels.tree"),
    *("gdn.triton_prior", "gdn.triton_rows", "gdn.triton_state", "gdn.triton_step"),
}


def variant(kernel, args, options):
    """What Triton compiles a launch for: types, alignments, ones, constants and options."""
    declared = vars(kernel) if hasattr(kernel, "do_not_specialize") else kernel.kwargs  # compiled, or interpreted
    plain, unaligned = (set(declared.get(key) or ()) for key in ("do_not_specialize", "do_not_specialize_on_alignment"))

    def kind(name, value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), name not in unaligned and value.data_ptr() % 16 == 0
        if isinstance(value, tuple):
            return tuple(kind(name, part) for part in value)
        if hasattr(value, "value"):  # a constexpr
            return "constant", value.value
        if isinstance(value, float):
            return "float"
        if value is None or isinstance(value, bool):
            return value
        wide = not -(2**31) <= value < 2**31
        return ("int", wide) if name in plain else ("int", wide, value == 1, value % 16 == 0)

    parts = [(name, kind(name, value)) for name, value in zip(kernel.arg_names, args, strict=False)]
    return name_of(kernel), *parts, *sorted((name, str(value)) for name, value in options.items())


@pytest.fixture
def variants(monkeypatch):
    """A set that every launch of a kernel adds its variant to, instead of running; blocks are those of an H200."""
    seen = set()

    def record(kernel, grid, *args, **options):
        if 0 not in grid:
            seen.add(variant(kernel, args, options))

    for room in map(importlib.import_module, ROOMS):
        if hasattr(room, "launch"):
            monkeypatch.setattr(room, "launch", record)
    for module in ("treewy.ops.launch", "treewy.ops.gdn.kernels"):
        monkeypatch.setattr(f"{module}.interpreted", lambda: False)
    monkeypatch.setattr(geometry, "gpu_of", lambda device: H200)
    return seen


@pytest.fixture
def cuda_variants(monkeypatch):
    """A set that every launch of the CUDA kernel, and every compilation, adds its variant to, instead of running."""
    seen = set()

    def kernel(chosen, index):
        assert index == 0
        seen.add(chosen)
        return SimpleNamespace(launch=lambda *_: None)

    limit = SimpleNamespace(shared_memory_per_block_optin=H200.shared)
    monkeypatch.setattr(entry, "kernel", kernel)
    monkeypatch.setattr(entry, "check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: limit)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return seen


def step(facts, num_seqs, num_rows, layers=2):
    """Launch what a step over a bucket does, with operands laid out as the facts say."""
    bucket = Bucket(num_seqs + 1, num_rows, max_rows=64, device="cpu")
    channels, width, heads = facts.conv_channels, facts.conv_width, facts.num_heads * facts.key_dim
    projected = torch.empty(layers, num_rows, facts.conv_row_stride or channels, dtype=facts.dtype)
    x = projected[..., :channels]
    weight = torch.empty(channels, width, dtype=facts.dtype)
    bias = torch.empty(channels, dtype=facts.dtype) if facts.conv_bias else None
    window = torch.empty(layers, 7, width - 1, channels, dtype=facts.dtype)
    lengths = torch.zeros(7, dtype=facts.index_dtype)
    slots = bucket.slots.to(facts.index_dtype)[1:]  # tables may start anywhere
    tables = bucket.tables._replace(cu_rows=bucket.tables.cu_rows[1:])
    paths = type(bucket.paths)(bucket.paths.rows[1:], bucket.paths.lengths[1:])
    fold = ledger.choose_folds(lengths, slots, paths.lengths, 8, backend="triton")
    sizes = heads, heads, channels - 2 * heads
    delta = DeltaRule(facts, num_rows, slots, tables, paths, fold)
    for layer, taps in enumerate((weight, weight.T.contiguous().T)):
        operands = (x[layer], taps, bias, window[layer], slots, tables)
        delta.run(*conv.verify_split(*operands, sizes, backend="triton"), layer)
        conv.commit(window[layer], slots, x[layer], paths, backend="triton")
    conv.commit(window, slots, x, paths, backend="triton")
    delta.append(paths)
    ledger.settle(lengths, slots, paths.lengths, fold, backend="triton")


def side_by_side(parts):
    """Return parts of rows [L, N, ...] as views of one stretch of bytes per row, 16 elements of 4 bytes aligned."""
    sizes = [part[0, 0].nbytes for part in parts]
    memory = torch.empty(*parts[0].shape[:2], -(-sum(sizes) // 64) * 64, dtype=torch.uint8)
    pieces = zip(memory[..., : sum(sizes)].split(sizes, dim=2), parts, strict=True)
    return [piece.view(part.dtype).unflatten(2, part.shape[2:]) for piece, part in pieces]


class DeltaRule:
    """Launches of the delta rule in a step: a first one, then under either policy, in either record of two."""

    def __init__(self, facts, num_rows, slots, tables, paths, fold):
        self.facts, self.slots, self.tables = facts, slots, tables
        heads, shape = facts.num_value_heads, (facts.num_value_heads, facts.value_dim)
        u = torch.bfloat16 if facts.state_dtype == torch.bfloat16 else torch.float32
        self.state = torch.empty(7, *shape, facts.key_dim, dtype=facts.state_dtype)

        def kept(*rows):
            keys = torch.empty(*rows, facts.num_heads, facts.key_dim, dtype=facts.dtype)
            return torch.empty(*rows, *shape, dtype=u), keys, *torch.empty(2, *rows, heads)

        records = [gdn.Record(*kept(num_rows)) for _ in range(2)]
        history = gdn.History(*kept(7, 16), torch.zeros(7, dtype=facts.index_dtype))
        self.priors = [
            [
                None,
                gdn.Prior(None, record, paths, fold),
                *(gdn.Prior(history, record, paths, fold, x) for x in (None, fold)),
                gdn.Prior(history, record, paths, fold, fold, slots.flip(0)),
            ]
            for record in records
        ]
        self.outs = [gdn.Verified(torch.empty(num_rows, *shape, dtype=facts.dtype), record) for record in records]
        self.stacked = gdn.StackedHistory(*kept(2, 7, 16), history.lengths), gdn.StackedRecord(*kept(2, num_rows))
        self.stretches = gdn.StackedRecord(*side_by_side(kept(2, num_rows)))
        self.gates = [torch.empty(num_rows, heads, dtype=facts.dtype) for _ in range(2)]
        self.layer = torch.empty(2, heads)

    def append(self, paths):
        history, record = self.stacked
        for taken in (record, self.stretches):
            gdn.append_layers(history, self.slots, taken, paths, backend="triton")

    def run(self, q, k, v, layer):
        facts = self.facts
        q, k, v = (y.unflatten(1, (-1, d)) for y, d in ((q, facts.key_dim), (k, facts.key_dim), (v, facts.value_dim)))
        x = gdn.Projections(q, k, v, *self.gates, *self.layer)
        for prior in self.priors[1 - layer]:
            out = self.outs[layer]
            gdn.commit_verify(x, self.state, self.slots, self.tables, prior=prior, out=out, backend="triton")


BOUNDS = {"history_capacity": 16, "row_bounds": [64]}
FACTS = {
    "35B-A3B": Facts(device="cpu", num_heads=16, num_value_heads=32, key_dim=128, value_dim=128, **BOUNDS),
    "one shard of 4, fused": Facts(
        device="cpu",
        num_heads=4,
        num_value_heads=8,
        key_dim=128,
        value_dim=128,
        conv_row_stride=3136,
        conv_bias=True,
        **BOUNDS,
    ),
    "float32, width 3": Facts(
        device="cpu",
        num_heads=2,
        num_value_heads=4,
        key_dim=16,
        value_dim=32,
        dtype=torch.float32,
        conv_width=3,
        index_dtype=torch.int32,
        **BOUNDS,
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_warmup_compiles_what_steps_launch(name, variants):
    warmup(FACTS[name])
    warmed = variants.copy()
    assert {parts[0] for parts in warmed} >= {
        *("convolve_paths", "shift_windows", "choose_folds_kernel", "settle_kernel", "append_layers_kernel")
    }
    for num_seqs, num_rows in ((1, 4), (1, 1), (3, 33), (8, 129), (5, 300), (32, 1280)):
        variants.clear()
        step(FACTS[name], num_seqs, num_rows)
        assert variants <= warmed, min(variants - warmed)


MODEL = Sizes(num_linear=1, num_softmax=1, num_seqs=3)
STEPS = {
    "35B-A3B": MODEL,
    "float32 states": MODEL._replace(state_dtype=torch.float32, max_rows=64, num_seqs=1, capacity=5, num_pages=256),
    "small trees, many": MODEL._replace(max_rows=4, num_seqs=40, max_path=4, num_slots=48),
    "float32, one KV head": MODEL._replace(
        dtype=torch.float32,
        state_dtype=torch.float32,
        num_kv_heads=1,
        num_query_heads=4,
        num_heads=2,
        num_value_heads=2,
    ),
}


def facts_of(sizes, device="cpu", **others):
    """Say of a step's sizes what warmup is to know."""
    stated = {
        "num_heads": sizes.num_heads,
        "num_value_heads": sizes.num_value_heads,
        "key_dim": sizes.dim,
        "value_dim": sizes.dim,
        "dtype": sizes.dtype,
        "state_dtype": sizes.state_dtype,
        # The rows of a convolution are a view of a projection that has the gates beside them.
        "conv_row_stride": sum(sizes.parts) + 2 * sizes.num_value_heads,
        "index_dtype": torch.int32,
        "history_capacity": sizes.capacity,
        "batch_sizes": [sizes.num_seqs],
        "row_bounds": [sizes.max_rows],
        "max_path": sizes.max_path,
        "num_query_heads": sizes.num_query_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "page_len": sizes.page,
        "max_places": sizes.page * sizes.num_pages,
        "vocab": sizes.vocab,
        "logits_dtype": torch.float32,
    }
    return Facts(device=device, **(stated | others))


def run_step(sizes, delta, device="cpu"):
    """Run a whole step of a model, over the smallest trees there are."""
    whole = WholeStep(sizes, "triton", delta, device)
    whole.load([DraftTree([-1])] * sizes.num_seqs, seed=0)
    whole.run()


@pytest.mark.parametrize("name", STEPS)
def test_warmup_compiles_what_a_whole_step_launches(name, variants):
    """Of all bounds that a caller names, among them those of the step."""
    sizes = STEPS[name]
    others = {"batch_sizes": [1, sizes.num_seqs, 7], "row_bounds": [sizes.max_rows, 128]}
    warmup(facts_of(sizes, **others))
    warmed = variants.copy()
    variants.clear()
    run_step(sizes, "triton")
    assert {parts[0] for parts in variants} >= {"gdn_step", "attend_parts_kernel", "accept_walk_kernel"}
    assert variants <= warmed, min(variants - warmed)


@pytest.mark.parametrize("name", list(STEPS)[:3])
def test_warmup_compiles_the_cuda_variant_of_a_step(name, variants, cuda_variants):
    sizes = STEPS[name]
    facts = facts_of(sizes, gdn_backend="cuda", batch_sizes=[1, sizes.num_seqs])
    warmup(facts)
    assert not cuda_variants  # none runs on a CPU
    assert "gdn_step" not in {parts[0] for parts in variants}  # the kernel of the other backend
    entry.warm(facts_of(sizes, "cuda", gdn_backend="cuda", batch_sizes=[1, sizes.num_seqs]))
    warmed = cuda_variants.copy()
    cuda_variants.clear()
    run_step(sizes, "cuda")
    assert cuda_variants
    assert cuda_variants <= warmed
    assert {chosen.bt for chosen in warmed} == {sizes.max_rows}
    # Fewer prior rows, as without a step before, fit a smaller variant.
    assert {chosen.pmax for chosen in warmed} >= {16, 16 * -(-(sizes.capacity + sizes.max_path) // 16)}


def test_the_cuda_room_leaves_another_backend_alone(cuda_variants):
    entry.warm(facts_of(MODEL, "cuda"))
    assert not cuda_variants


@pytest.mark.parametrize("drawn", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("weights", [torch.float64, torch.float32])
def test_warmup_compiles_sampling(drawn, weights, variants):
    facts = facts_of(MODEL, drawn_dtype=drawn, max_path=None, row_bounds=[8, 33])
    warmup(facts, rooms=["treewy.ops.accept.kernels"])
    warmed = variants.copy()
    variants.clear()
    bucket = Bucket(3, 20, max_rows=33, device="cpu")
    numbers = accept.uniforms(
        torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 33, backend="triton"
    )
    laws, tokens = accept.request_laws([None] * 3), torch.zeros(20, dtype=torch.int32)
    drafts = None if drawn is None else accept.DrawnLaws(torch.zeros(5, MODEL.vocab, dtype=drawn), tokens)
    accept.sampled(
        bucket.tables, tokens, torch.zeros(20, MODEL.vocab), laws, numbers,
        drawn=drafts, slots=bucket.slots.int(), weights=weights, backend="triton",
    )  # fmt: skip
    assert {parts[0] for parts in variants} == {"accept_sampled_kernel", "accept_uniforms_kernel"}
    assert variants <= warmed, min(variants - warmed)


@pytest.mark.parametrize("num_seqs", [1, 3, 40])
def test_warmup_compiles_tables_with_faults(num_seqs, variants):
    facts = facts_of(MODEL, batch_sizes=[1, num_seqs], max_path=5, row_bounds=[33])
    warmup(facts, rooms=["treewy.ops.tree.kernels"])
    warmed = variants.copy()
    variants.clear()
    given = Bucket(num_seqs, 80, max_rows=33, device="cpu").tables
    faults = torch.zeros(num_seqs, dtype=torch.int32)
    made = trees.tables(given.parents, given.cu_rows, max_rows=33, faults=faults, backend="triton")
    trees.paths(made, faults, max_path=5, backend="triton")
    assert len(variants) == 2
    assert variants <= warmed, min(variants - warmed)


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def parsed():
    """Every module of the ops, by name, with its syntax."""
    for file in OPS.rglob("*.py"):
        parts = file.relative_to(OPS).with_suffix("").parts
        yield ".".join(("treewy.ops", *parts)).removesuffix(".__init__"), ast.parse(file.read_text())


def launched(tree):
    """Kernels that a module launches, by name; a CUDA kernel has none."""
    plain = [node.args[0].id for node in calls(tree) if isinstance(node.func, ast.Name) and node.func.id == "launch"]
    return {
        *plain,
        *(None for node in calls(tree) if isinstance(node.func, ast.Attribute) and node.func.attr == "launch"),
    }


def has_kernels(tree):
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "triton.jit" for node in ast.walk(tree))


def test_every_module_with_kernels_is_a_room():
    """A kernel that no room offers would compile in the middle of a capture."""
    modules = dict(parsed())
    assert {name for name, tree in modules.items() if launched(tree)} == set(ROOMS)
    with_kernels = {name for name, tree in modules.items() if has_kernels(tree)}
    assert with_kernels - set(ROOMS) == {f"treewy.ops.{name}" for name in DEVICE_FUNCTIONS}
    for name, tree in modules.items():
        if name != "treewy.ops.launch":  # kernel[grid](...) would pass `launch` by
            assert not [node for node in calls(tree) if isinstance(node.func, ast.Subscript)], name
    for room in ROOMS:
        assert list(inspect.signature(importlib.import_module(room).warm).parameters) == ["facts"]


TINY = {
    **{"num_heads": 1, "num_value_heads": 2, "key_dim": 16, "value_dim": 16, "dtype": torch.float32},
    **{"num_query_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab": 5, "drawn_dtype": torch.float32},
    **{"history_capacity": 2, "row_bounds": [4], "batch_sizes": [2], "max_places": 32},
}


def test_warmup_launches_every_kernel():
    """On memory of its own: nothing is passed in, so nothing can be written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = {name for _, tree in parsed() for name in launched(tree) if name is not None}
    LAUNCHES.clear()
    warmup(Facts(device=device, **TINY))
    assert set(LAUNCHES) == names - UNCAPTURED


@pytest.mark.parametrize(
    ("left_out", "kernels"),
    [
        ("num_query_heads", {"attend_parts_kernel", "merge_parts_kernel", "commit_rows_kernel", "compact_rows_kernel"}),
        ("vocab", {"accept_choices_kernel", "accept_walk_kernel", "accept_sampled_kernel", "accept_uniforms_kernel"}),
    ],
)
def test_what_a_model_lacks_is_not_compiled(left_out, kernels, variants):
    warmup(Facts(device="cpu", **TINY))
    everything = {parts[0] for parts in variants}
    variants.clear()
    warmup(Facts(device="cpu", **TINY | {left_out: 0}))
    assert everything - {parts[0] for parts in variants} == kernels


def test_where_no_kernel_runs_there_is_nothing_to_compile():
    """Neither a GPU nor Triton's interpreter is needed to ask."""
    code = (
        "import sys, torch; from treewy.ops import Facts, warmup; from treewy.ops.launch import LAUNCHES; "
        "warmup(Facts(device='cpu', num_heads=1, num_value_heads=2, key_dim=16, value_dim=16)); "
        "assert not LAUNCHES and 'triton' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_a_backend_without_kernels_is_refused():
    with pytest.raises(BackendError, match="triton or cuda; got 'eager'"):
        facts_of(MODEL, gdn_backend="eager")


@pytest.mark.gpu
@pytest.mark.parametrize("delta", ["cuda", "triton"])
@pytest.mark.parametrize("name", list(STEPS)[:3])
def test_no_step_compiles_after_warmup(name, delta, monkeypatch):
    import triton

    late, sizes = [], STEPS[name]
    warmup(facts_of(sizes, "cuda", gdn_backend=delta))
    misses = compiled_variant.cache_info().misses
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: late.append(facts["repr"]))
    run_step(sizes, delta, "cuda")
    assert not late
    assert compiled_variant.cache_info().misses == misses
    run_step(sizes._replace(max_rows=2 * sizes.max_rows), "triton", "cuda")
    assert late  # the hook does hear of a kernel that is compiled


def test_facts_count_channels():
    assert FACTS["35B-A3B"].conv_channels == 8192


@pytest.mark.parametrize(("device", "said"), [("nope", "PyTorch knows; got 'nope'"), ("cuda", "sees none")])
def test_a_device_that_is_not_there_is_refused(device, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = Facts(device=device, num_heads=1, num_value_heads=1, key_dim=16, value_dim=16)
    with pytest.raises(BackendError, match=said):
        warmup(facts)
