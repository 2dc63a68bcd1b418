"""The layer: whose memory it shares, which rows go which way, and what deep sleep leaves of it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.errors import UnsupportedError
from treewy.vllm_plugin import layer as module
from treewy.vllm_plugin.layer import Shared, layer_class
from treewy.vllm_plugin.step import Drafted, Tables
from vllm_plugin.fakes import compat
from vllm_plugin.rows import DIM, HEADS, VALUE_HEADS, Engine
from vllm_plugin.stand_in import config
from vllm_plugin.test_step import STEPS

WIDE = (2 * HEADS + VALUE_HEADS) * DIM


class Base(torch.nn.Module):
    """vLLM's layer, as far as the plugin's builds on it."""

    tp_rank = 0

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__()
        self.prefix, self.options, self.tp_size, self.num_spec = prefix, options, 2, 3
        # Of both GPUs.
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = 2 * HEADS, 2 * VALUE_HEADS, DIM, DIM
        self.key_dim, self.value_dim = self.num_k_heads * DIM, self.num_v_heads * DIM
        self.A_log, self.dt_bias = (torch.nn.Parameter(torch.zeros(VALUE_HEADS), requires_grad=False) for _ in range(2))
        self.enable_fused_gdn_spec_decode, self._forward_method = True, None
        self.own: list[Any] = []
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def forward_cuda(self) -> None:
        """Run on a GPU, and with the plugin everywhere."""

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        """Return dtypes of window and state."""
        return torch.bfloat16, torch.float32

    def get_kv_cache_spec(self, vllm_config: Any) -> str:
        """Return a spec."""
        return "spec"

    def get_attn_backend(self) -> type:
        """Return the backend."""
        return Base

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        self.own.append(mixed_qkv)


def vllm(context: Any) -> Any:
    """Return a compat module whose convolution leaves rows as they are; vLLM's own path writes the rows' first values."""

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, prefix: str) -> None:
        context.seen.append(context.attn_metadata[prefix])
        if context.fails:
            raise RuntimeError("a kernel fails")
        core_attn_out.copy_(mixed_qkv[:, :1, None].expand_as(core_attn_out))

    return compat(
        QwenGatedDeltaNetAttention=Base,
        GDNAttentionMetadata=Shared,
        GDNAttentionMetadataBuilder=object,
        GDNAttentionBackend=object,
        get_forward_context=lambda: context,
        cpu_core=core,
        chain_conv=lambda layer, metadata, x, max_rows: x,
        one_state_per_request=lambda spec: f"one state of {spec}",
    )


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a configuration of vLLM that has what the layer reads."""
    monkeypatch.setattr(module, "refuse", lambda vllm_config, options: None)
    made = config(additional_config={"treewy": {"mamba_state_commit": "ring", "ring_capacity": 8}})
    made.compilation_config.static_forward_context = {}
    made.compilation_config.max_cudagraph_capture_size = 50
    made.scheduler_config = SimpleNamespace(max_num_seqs=8)
    made.model_config.dtype = torch.float32
    made.model_config.get_num_layers_by_block_type = lambda parallel, kind: 2 if kind == "linear_attention" else 9
    return made


def layers(whole: Any, count: int, context: Any = None) -> list[Any]:
    """Return the first layers of a model."""
    context = context or SimpleNamespace(attn_metadata={}, seen=[], fails=False)
    made = layer_class(vllm(context))
    return [made(None, whole, f"layer{number}", reduce_results=False) for number in range(count)]


def test_layers_of_a_model_share_their_memory(whole: Any) -> None:
    first, second = layers(whole, 2)
    assert first.treewy is second.treewy
    assert (first.treewy_number, second.treewy_number) == (0, 1)
    assert first.options == {"reduce_results": False}
    sizes = first.treewy.memory.sizes
    assert (sizes.num_heads, sizes.num_value_heads, sizes.num_layers) == (HEADS, VALUE_HEADS, 2)  # this GPU's share
    assert (sizes.num_requests, sizes.step_rows, sizes.kept_rows) == (8, 4, 8)
    assert sizes.num_step_rows == 50  # of the largest captured graph
    assert not first.enable_fused_gdn_spec_decode
    assert first._forward_method == first.forward_cuda
    assert first.get_kv_cache_spec(whole) == "one state of spec"
    assert first.get_attn_backend().__name__ == "Backend"
    assert first.treewy.step.counts.logs


def test_two_engines_share_nothing(whole: Any) -> None:
    (first,) = layers(whole, 1)
    whole.compilation_config.static_forward_context = {}
    (other,) = layers(whole, 1)
    assert other.treewy_number == 0
    assert other.treewy is not first.treewy


def test_one_worker_of_several_logs(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "tp_rank", 1, raising=False)
    (made,) = layers(whole, 1)
    assert not made.treewy.step.counts.logs


def test_without_options_it_is_vllms(whole: Any) -> None:
    whole.additional_config = {}
    (made,) = layers(whole, 1)
    assert made.treewy is None
    assert (made.get_kv_cache_spec(whole), made.get_attn_backend()) == ("spec", Base)
    assert made.enable_fused_gdn_spec_decode
    assert not list(made.buffers())
    rows = torch.ones(1, WIDE)
    made._forward_core(rows, rows, rows, rows)
    assert made.own == [rows]


def test_a_drafter_with_such_layers_is_refused(whole: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"Only the target .* 2 of them; layer2 is another, the drafter's\. Draft"
    ):
        layers(whole, 3)


def test_no_weights_beside_those_of_the_checkpoint(whole: Any) -> None:
    """What a layer holds besides is no weight to load, and no buffer of the layer itself, which vLLM loads again with it."""
    first, second = layers(whole, 2)
    assert [name for name, _ in first.named_parameters()] == ["A_log", "dt_bias"]
    assert list(first.state_dict()) == ["A_log", "dt_bias"]
    assert not dict(first.named_buffers(recurse=False))
    assert not list(second.buffers())
    lasting = {buffer.data_ptr() for buffer in first.buffers()}
    assert lasting == {tensor.data_ptr() for tensor in first.treewy.step.lasting.values()}


@pytest.mark.parametrize(("ragged", "garbage"), [(False, 77), (True, -77)])
def test_deep_sleep(ragged: bool, garbage: int) -> None:
    """It takes all memory made while a model is loaded, and brings back the buffers of the model, by name."""
    engine = Engine(8)
    engine.run([0, 3], [2, 7], [4, 2 if ragged else 4], [3, 1])
    model = module._Lasting(engine.step.lasting)
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tensors = [*engine.memory.step, *engine.memory.kept]
    for value in vars(engine.step).values():
        tensors += [value] if isinstance(value, torch.Tensor) else []
    tensors += [part for part in engine.step._buffers if isinstance(part, torch.Tensor)]
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else garbage)
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])
    for request in range(8):
        engine.forget(request)
    engine.checker.largest = 0.0
    for step in STEPS:
        engine.run(*step, padding=2)
    assert all(output.isfinite().all() for output in engine.outputs)
    assert engine.checker.largest < 1e-6


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("leading", "drafts", "others"), [(None, [3, 4], [0, 1, 2, 5]), (2, [0, 1], [2, 3, 4, 5])])
def test_rows_of_both_kinds_go_their_ways(
    whole: Any, leading: int | None, drafts: list[int], others: list[int], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault D07: each sees its own rows in order, of its own metadata; what the other reads is back afterwards.

    Where rows of drafts come first, both kinds run where they lie; else they are gathered, and brought back.
    """
    context = SimpleNamespace(seen=[], fails=fails)
    (made,) = layers(whole, 1, context)
    rest = SimpleNamespace(num_actual_tokens=len(others))
    mixed = SimpleNamespace(
        spec_sequence_masks="masks",
        rest=rest,
        leading_rows=leading,
        spec_token_indx=torch.tensor(drafts, dtype=torch.int32),
        non_spec_token_indx=torch.tensor(others, dtype=torch.int32),
    )
    context.attn_metadata = {"layer0": mixed, "layer1": "another's"}
    drafted: list[Any] = []

    def verify(self: Any, given: Any, x: Any, b: Any, a: Any, out: Any) -> None:
        drafted.append((given, x[:, 0].tolist(), b.tolist(), a.tolist()))
        in_place.append(out.untyped_storage().data_ptr() == whole_out.untyped_storage().data_ptr())
        out.fill_(-1.0)

    in_place: list[bool] = []
    monkeypatch.setattr(type(made), "_drafted", verify)
    rows = torch.arange(8.0)[:, None].expand(8, WIDE)  # two rows of padding
    whole_out = torch.full((8, VALUE_HEADS, DIM), 9.0)
    with pytest.raises(RuntimeError, match="a kernel fails") if fails else nullcontext():
        made._forward_core(rows, torch.arange(8.0), torch.arange(8.0) + 10, whole_out)
    if not fails:
        assert whole_out[:6, 0, 0].tolist() == [-1 if row in drafts else row for row in range(6)]
        assert whole_out[6:].eq(9).all()
    assert drafted == [(mixed, drafts, drafts, [row + 10 for row in drafts])]
    assert in_place == [leading is not None]
    assert context.seen == [rest]
    assert context.attn_metadata == {"layer0": mixed, "layer1": "another's"}


@pytest.mark.parametrize("attn_metadata", [None, {"another": 1}, {"layer0": SimpleNamespace(spec_sequence_masks=None)}])
def test_without_drafts_vllms_path_runs(whole: Any, attn_metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In profiling runs too, which have no metadata."""
    context = SimpleNamespace(attn_metadata=attn_metadata)
    (made,) = layers(whole, 1, context)
    ran: list[Any] = []
    monkeypatch.setattr(type(made), "_undrafted", lambda self, *rows: ran.append(rows))
    given = tuple(torch.ones(1) for _ in range(4))
    made._forward_core(*given)
    assert ran == [given]


def test_a_layer_verifies_its_own_heads(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault B07: rows of padding behind them are left alone; buffers are checked the first time only."""
    (made,) = layers(whole, 1)
    shared = made.treewy
    engine = Engine(8)
    shared.step.begin(Drafted(np.arange(2), np.array([4, 0], np.int32), np.array([4, 2], np.int32)), 2, 6)
    current = shared.step.tables
    assert isinstance(current, Tables)
    state = engine.states[0]
    monkeypatch.setattr(made, "states", state, raising=False)
    given = SimpleNamespace(treewy=current, spec_state_indices_tensor=torch.tensor([[5], [2]], dtype=torch.int32))
    checked: list[bool] = []
    real = module.gdn.commit_verify

    def commit_verify(*operands: Any, **options: Any) -> Any:
        checked.append(options["checked"])
        return real(*operands, **options)

    monkeypatch.setattr(module.gdn, "commit_verify", commit_verify)
    rows, gates = engine.normal(9, WIDE), engine.normal(9, VALUE_HEADS)
    out = torch.full((9, VALUE_HEADS, DIM), 7.0)
    for _ in range(2):
        made._drafted(given, rows, gates, gates, out)
    assert checked == [False, True]
    q, k, v = rows[:6].split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=1)
    x = module.gdn.Projections(
        q.unflatten(1, (HEADS, DIM)),
        k.unflatten(1, (HEADS, DIM)),
        v.unflatten(1, (VALUE_HEADS, DIM)),
        gates[:6],
        gates[:6],
        made.A_log,
        made.dt_bias,
    )
    want = real(x, state, torch.tensor([5, 2]), current.tree)
    assert torch.allclose(out[:6], want.o, atol=1e-5)
    assert out[6:].eq(7.0).all()
    assert torch.equal(shared.memory.step.k[0, :6], x.k)
    assert not shared.memory.step.k[1].any()
