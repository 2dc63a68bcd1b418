"""The Gated DeltaNet layer of vLLM's models, verifying in closed form from one committed state per request."""

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from treewy.errors import UnsupportedError
from treewy.ops import gdn
from treewy.packed import PathTables
from treewy.shapes import Float, Tensor
from treewy.vllm_plugin import first_runner, second_runner, tree_attention
from treewy.vllm_plugin.announcement import announce_rows
from treewy.vllm_plugin.check import Checker
from treewy.vllm_plugin.conv import tree_conv
from treewy.vllm_plugin.memory import Memory, Sizes
from treewy.vllm_plugin.metadata import backend_class
from treewy.vllm_plugin.options import Options, options_of
from treewy.vllm_plugin.refusals import refuse
from treewy.vllm_plugin.state import layers_of
from treewy.vllm_plugin.step import Step, Tables
from treewy.vllm_plugin.trees import Trees


class Shared(NamedTuple):
    """What the layers of one engine share."""

    options: Options
    memory: Memory
    step: Step
    backend: str
    checker: Checker | None
    trees: Trees | None = None

    @property
    def exact(self) -> bool:
        """Whether the rule keeps float32's accuracy: trees have many rows, and their states would lose digits to bfloat16."""
        return self.trees is not None and self.memory.sizes.u_dtype == torch.float32

    def finish(self, num_sampled: Tensor) -> PathTables | None:
        """Keep what the step accepted, and return the paths, packed; None if nothing verified."""
        tables, drafted = self.step.tables, self.step.drafted
        path = self.step.finish(num_sampled, None if self.trees is None else self.trees.path)
        if self.checker is not None and tables is not None and path is not None:
            local = path.rows - tables.tree.cu_rows[: len(path.lengths), None]
            self.checker.accept(drafted.requests, local.tolist(), path.lengths.tolist())
        if self.trees is not None:
            self.trees.finish(path)
        return path

    def forget(self, request: int) -> None:
        """Drop what is known of a request: another one has its index now, or it begins again."""
        self.step.forget(request)
        if self.checker is not None:
            self.checker.forget(request)


def layer_class(vllm: ModuleType) -> type:
    """Return the layer; without options of ours it does what its base does, bit for bit.

    Args:
        vllm: The compat module of the installed vLLM.
    """
    backend = backend_class(vllm)

    class GatedDeltaNet(vllm.QwenGatedDeltaNetAttention):
        """One state per request in the page; rows that are not in it yet lie in the plugin's memory."""

        treewy: Shared | None = None

        def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **options: Any) -> None:
            super().__init__(config, vllm_config, prefix, **options)
            wanted = options_of(vllm_config)
            if not wanted.active:
                return
            refuse(vllm_config, wanted)  # already refused where the configuration was made, unless by somebody else
            others = layers_of(vllm_config)
            self.treewy_number = len(others)
            self.treewy = shared = others[0].treewy if others else _make_shared(self, vllm_config, wanted)
            _check_number(self.treewy_number, shared.memory.sizes.num_layers, prefix)
            if not others:
                trees = {} if shared.trees is None else shared.trees.lasting
                self.treewy_lasting = _Lasting(shared.step.lasting | trees)
                if shared.trees is not None:
                    tree_attention.register(vllm, on_cpu=not self.A_log.is_cuda)
                if vllm_config.use_v2_model_runner:
                    second_runner.run_prompts_eagerly(vllm, shared.memory.sizes.step_rows)
                else:
                    first_runner.wrap(vllm, shared)
            self.enable_fused_gdn_spec_decode = self._checked = False
            self._forward_method = self.forward_cuda
            if self.dt_bias.is_cuda:
                # Our kernel reads it in float32. The parameter itself is: weights may be loaded again at any time, and a
                # converted copy would not know. vLLM's own kernels convert as they load.
                loader = vars(self.dt_bias)["weight_loader"]
                self.dt_bias = torch.nn.Parameter(self.dt_bias.data.float())
                vllm.set_weight_attrs(self.dt_bias, {"weight_loader": loader})

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            spec = super().get_kv_cache_spec(vllm_config)
            return spec if self.treewy is None else vllm.one_state_per_request(spec)

        def get_attn_backend(self) -> type:
            return super().get_attn_backend() if self.treewy is None else backend

        def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            context = vllm.get_forward_context()
            of_layers: dict[str, Any] = context.attn_metadata or {}
            metadata = of_layers.get(self.prefix)
            if self.treewy is None or metadata is None or metadata.spec_sequence_masks is None:
                self._undrafted(mixed_qkv, b, a, core_attn_out)
            elif metadata.rest is None:
                self._drafted(metadata, mixed_qkv, b, a, core_attn_out)
            else:
                self._mixed(of_layers, mixed_qkv, b, a, core_attn_out)

        def _undrafted(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            if mixed_qkv.is_cuda or self.treewy is None:
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
            else:
                vllm.cpu_core(mixed_qkv, b, a, core_attn_out, self.prefix)

        def _mixed(self, all_metadata: dict, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            metadata = all_metadata[self.prefix]
            lead = metadata.leading_rows
            if lead is not None:
                # vLLM puts requests that decode first: nothing is copied.
                rest = slice(lead, lead + metadata.rest.num_actual_tokens)
                self._drafted(metadata, mixed_qkv[:lead], b[:lead], a[:lead], core_attn_out[:lead])
                self._others(all_metadata, mixed_qkv[rest], b[rest], a[rest], core_attn_out[rest])
                return
            for rows, run in (
                (metadata.spec_token_indx, partial(self._drafted, metadata)),
                (metadata.non_spec_token_indx, partial(self._others, all_metadata)),
            ):
                out = torch.zeros_like(core_attn_out[: len(rows)])
                run(mixed_qkv.index_select(0, rows), b.index_select(0, rows), a.index_select(0, rows), out)
                core_attn_out.index_copy_(0, rows.long(), out)

        def _others(self, all_metadata: dict, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            """Run rows that are no drafts, as if they were a batch of their own."""
            metadata = all_metadata[self.prefix]
            all_metadata[self.prefix] = metadata.rest
            try:
                self._undrafted(mixed_qkv, b, a, core_attn_out)
            finally:
                all_metadata[self.prefix] = metadata

        def _drafted(self, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            shared, tables = self.treewy, metadata.treewy
            assert shared is not None
            memory = shared.memory
            rows, slots = tables.tree.num_rows, metadata.spec_state_indices_tensor[:, 0]
            conv_out = self._conv(metadata, mixed_qkv[:rows], slots, tables)
            q, k, v = conv_out.split([self.key_dim // self.tp_size] * 2 + [self.value_dim // self.tp_size], dim=-1)
            heads = self.num_k_heads // self.tp_size
            x = gdn.Projections(
                q.view(rows, heads, -1),
                k.view(rows, heads, -1),
                v.view(rows, -1, self.head_v_dim),
                a[:rows],
                b[:rows],
                self.A_log,
                self.dt_bias,
            )
            out = gdn.Verified(core_attn_out[:rows], shared.memory.step_of(self.treewy_number, rows))
            prior = _prior(shared.memory, self.treewy_number, tables)
            if shared.checker is not None:
                shared.checker.observe(
                    self.treewy_number,
                    x,
                    vllm.state_of(self),
                    slots,
                    memory.kept_of(self.treewy_number),
                    tables.places,
                    tables.tree.cu_rows,
                )
            # Shapes and buffers are the same ever after, but for the number of rows.
            given = {"prior": prior, "out": out, "backend": shared.backend, "checked": self._checked}
            given["exact"] = shared.exact
            gdn.commit_verify(x, vllm.state_of(self), slots, tables.tree, **given)
            self._checked = True

        def _conv(self, metadata: Any, x: Float[Tensor, "N C"], slots: Tensor, tables: Tables) -> Float[Tensor, "N C"]:
            shared = self.treewy
            assert shared is not None
            if shared.trees is None:
                return vllm.chain_conv(self, metadata, x, shared.memory.sizes.step_rows)
            weight, bias = vllm.conv_weight(self), self.conv1d.bias
            count = tables.tree.num_seqs
            return tree_conv(
                x, vllm.window_of(self), weight, bias, slots[:count], metadata.num_accepted_tokens, tables.tree
            )

    GatedDeltaNet.__name__ = vllm.QwenGatedDeltaNetAttention.__name__
    return GatedDeltaNet


class _Lasting(torch.nn.Module):
    """Buffers that vLLM's deep sleep saves, as it does those of models: the rest of the memory comes back as garbage.

    A module of its own: vLLM reloads weights by the layer, and would reload these with it.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.add(tensors)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Have more of them saved: the drafter's and the sampler's are made after the layers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


def _check_number(number: int, num_layers: int, prefix: str) -> None:
    if number >= num_layers:
        raise UnsupportedError(
            f"Only the target may have Gated DeltaNet layers, {num_layers} of them; {prefix} is another, the drafter's. Draft "
            "with the model's own head, or without the options of treewy."
        )


def _prior(memory: Memory, layer: int, tables: Tables) -> gdn.Prior:
    return gdn.Prior(memory.kept_of(layer), None, None, tables.fold, places=tables.places)


def _make_shared(layer: Any, vllm_config: Any, options: Options) -> Shared:
    """Make what the layers share, at the first of them; memory is allocated while vLLM counts it as the model's."""
    state_dtype = layer.get_state_dtype()[1]
    requests, rows = vllm_config.scheduler_config.max_num_seqs, layer.num_spec + 1
    largest_graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    sizes = Sizes(
        num_layers=_num_layers(vllm_config),
        num_requests=requests,
        step_rows=rows,
        kept_rows=options.kept_rows(rows),
        max_path=options.longest_path(rows - 1),
        num_step_rows=max(requests * rows, largest_graph),
        num_heads=layer.num_k_heads // layer.tp_size,
        num_value_heads=layer.num_v_heads // layer.tp_size,
        key_dim=layer.head_k_dim,
        value_dim=layer.head_v_dim,
        u_dtype=torch.bfloat16 if state_dtype == torch.bfloat16 else torch.float32,
        k_dtype=vllm_config.model_config.dtype,
    )
    announce_rows(sizes.num_bytes, requests)
    device = layer.A_log.device
    memory, backend = Memory(sizes, device), _backend(sizes, device)
    checker = Checker(options.check_every) if options.check_every else None
    tree = options.tree(rows - 1)
    step = Step(memory, "eager" if backend == "eager" else "triton", tree)
    step.counts.logs = layer.tp_rank == 0  # the others would say the same
    return Shared(
        options, memory, step, backend, checker, None if options.widths is None else Trees(tree, requests, device)
    )


def _num_layers(vllm_config: Any) -> int:
    return vllm_config.model_config.get_num_layers_by_block_type(vllm_config.parallel_config, "linear_attention")


def _backend(sizes: Sizes, device: torch.device) -> str:
    """Return the fastest backend of the rule for these heads."""
    if device.type != "cuda":
        return "eager"
    fits_cuda = (
        sizes.key_dim == sizes.value_dim == 128
        and sizes.k_dtype == torch.bfloat16
        and sizes.step_rows <= 64
        and sizes.kept_rows <= 80
    )
    return "cuda" if fits_cuda else "triton"
