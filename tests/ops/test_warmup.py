"""Warmup compiles what steps launch: the variants of kernels that Triton would tell apart, without compiling any."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

import treewy.ops
import treewy.ops.gdn.kernels
from ops.buckets import Bucket
from treewy.ops import Facts, conv, gdn, warmup
from treewy.ops.gdn import ledger
from treewy.ops.launch import LAUNCHES, name_of
from treewy.ops.warmup import ROOMS

OPS = Path(treewy.ops.__file__).parent


def variant(kernel, args, options):
    """What Triton compiles a launch for: types, alignments, ones, constants and options."""
    declared = vars(kernel) if hasattr(kernel, "do_not_specialize") else kernel.kwargs  # compiled, or interpreted
    plain, unaligned = (set(declared[key] or ()) for key in ("do_not_specialize", "do_not_specialize_on_alignment"))

    def kind(name, value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), name not in unaligned and value.data_ptr() % 16 == 0
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, tuple):
            return tuple(kind(None, part) for part in value)
        if not isinstance(value, int):
            return repr(value)  # a constant
        wide = not -(2**31) <= value < 2**31
        return ("int", wide) if name in plain else ("int", wide, value == 1, value % 16 == 0)

    parts = [(name, kind(name, value)) for name, value in zip(kernel.arg_names, args, strict=False)]
    return name_of(kernel), *parts, *sorted(options.items())


@pytest.fixture
def variants(monkeypatch):
    """A set that every launch of a kernel adds its variant to, instead of running."""
    seen = set()

    def record(kernel, grid, *args, **options):
        if 0 not in grid:
            seen.add(variant(kernel, args, options))

    for room in ROOMS:
        monkeypatch.setattr(importlib.import_module(room), "launch", record)
    # Nothing runs, so that bfloat16 is none of the interpreter's business.
    monkeypatch.setattr(gdn.kernels, "refuse_interpreted_bfloat16", lambda *operands: None)
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
    ledger.settle(lengths, slots, paths.lengths, fold, backend="triton")


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
            ]
            for record in records
        ]
        self.outs = [gdn.Verified(torch.empty(num_rows, *shape, dtype=facts.dtype), record) for record in records]
        self.gates = [torch.empty(num_rows, heads, dtype=facts.dtype) for _ in range(2)]
        self.layer = torch.empty(2, heads)

    def run(self, q, k, v, layer):
        facts = self.facts
        q, k, v = (y.unflatten(1, (-1, d)) for y, d in ((q, facts.key_dim), (k, facts.key_dim), (v, facts.value_dim)))
        x = gdn.Projections(q, k, v, *self.gates, *self.layer)
        for prior in self.priors[1 - layer]:
            out = self.outs[layer]
            gdn.commit_verify(x, self.state, self.slots, self.tables, prior=prior, out=out, backend="triton")


FACTS = {
    "35B-A3B": Facts(device="cpu", num_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
    "one shard of 4, fused": Facts(
        device="cpu", num_heads=4, num_value_heads=8, key_dim=128, value_dim=128, conv_row_stride=3136, conv_bias=True
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
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_warmup_compiles_what_steps_launch(name, variants):
    warmup(FACTS[name])
    warmed = variants.copy()
    assert {parts[0] for parts in warmed} >= {"convolve_paths", "shift_windows", "choose_folds_kernel", "settle_kernel"}
    for num_seqs, num_rows in ((1, 4), (1, 1), (3, 33), (8, 129), (5, 300), (32, 1280)):
        variants.clear()
        step(FACTS[name], num_seqs, num_rows)
        assert variants <= warmed, next(iter(variants - warmed))


def test_warmup_launches_run():
    """On memory of their own: nothing is passed in, so nothing can be written."""
    before = LAUNCHES.copy()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = Facts(device=device, num_heads=1, num_value_heads=2, key_dim=4, value_dim=4, dtype=torch.float32)
    warmup(facts)
    assert LAUNCHES["convolve_paths"] > before["convolve_paths"]


def test_every_module_with_kernels_is_a_room():
    """A kernel that no room offers would compile in the middle of a capture."""
    files = [file for file in OPS.rglob("*.py") if "@triton.jit" in file.read_text()]
    modules = {".".join(("treewy.ops", *file.relative_to(OPS).with_suffix("").parts)) for file in files}
    assert modules == set(ROOMS)
    for room in ROOMS:
        assert list(inspect.signature(importlib.import_module(room).warm).parameters) == ["facts"]


def test_facts_count_channels():
    assert FACTS["35B-A3B"].conv_channels == 8192
