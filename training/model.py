"""The training model: Qwen3.5 text architecture plus its MTP head, with the tensor names of a checkpoint.

Letters: B sequences, T positions, D hidden size, H key heads, HV value heads, K head dim, W conv width, J MTP steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Config:
    """Shape of the model; field names follow transformers' `Qwen3_5TextConfig`."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 384
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    layer_types: list[str] = field(default_factory=lambda: list(LAYERS))

    def to_hf(self) -> dict:
        """The checkpoint's config.json."""
        out = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": out.pop("rope_theta"),
            "partial_rotary_factor": out.pop("partial_rotary_factor"),
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **out,
            "num_hidden_layers": len(self.layer_types),
            "full_attention_interval": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "mtp_num_hidden_layers": 1,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMS norm with a zero-centred weight: x / rms(x) * (1 + weight)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, then times silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return (y * F.silu(gate.float())).to(gate.dtype)


def rotary(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [T, rotary dims], of the given positions."""
    dim = int(config.head_dim * config.partial_rotary_factor)
    freq = config.rope_theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.float()[:, None] * freq[None]
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of x [B, heads, T, head_dim] (halves convention); the rest passes."""
    r = cos.shape[-1]
    a, rest = x[..., :r], x[..., r:]
    half = torch.cat([-a[..., r // 2 :], a[..., : r // 2]], -1)
    return torch.cat([(a * cos + half * sin).to(x.dtype), rest], -1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over a sequence: transformers' chunked torch version, on any device.

    q, k [B, T, HV, K]; v [B, T, HV, V]; g (log decay), beta [B, T, HV]. Normalises q and k, scales q by K ** -0.5.
    """
    # Under transformers' wrapper, which picks fla wherever that is installed; fla's backward kernels refuse to run on
    # Hopper with Triton 3.4 to 3.7.0.
    rule = torch_chunk_gated_delta_rule.__wrapped__
    return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


class LinearAttention(nn.Module):
    """Gated DeltaNet mixer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.key_dim = c.linear_num_key_heads * c.linear_key_head_dim
        self.value_dim = c.linear_num_value_heads * c.linear_value_head_dim
        channels = 2 * self.key_dim + self.value_dim
        heads = c.linear_num_value_heads
        self.conv1d = nn.Conv1d(channels, channels, c.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = GatedNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.in_proj_qkv = nn.Linear(c.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, heads, bias=False)
        self.out_proj = nn.Linear(self.value_dim, c.hidden_size, bias=False)

    def conv(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution over T of [B, T, C], then silu; written as shifts so that it fuses."""
        width = self.c.linear_conv_kernel_dim
        weight = self.conv1d.weight[:, 0].float()
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        total = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(width))
        return F.silu(total).to(x.dtype)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Operands q, k, v, g, beta of the delta rule, and the output gate z [B, T, HV, V]."""
        c, (batch, length, _) = self.c, x.shape
        mixed = self.conv(self.in_proj_qkv(x))
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        groups = c.linear_num_value_heads // c.linear_num_key_heads
        q, k = (t.reshape(batch, length, -1, c.linear_key_head_dim).repeat_interleave(groups, 2) for t in (q, k))
        v = v.reshape(batch, length, -1, c.linear_value_head_dim)
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        z = self.in_proj_z(x).reshape(batch, length, -1, c.linear_value_head_dim)
        return q.contiguous(), k.contiguous(), v.contiguous(), g, beta, z

    def after(self, out: Tensor, z: Tensor) -> Tensor:
        """Norm, gate and project the delta rule's output."""
        return self.out_proj(self.norm(out, z).flatten(2))


class Attention(nn.Module):
    """Full attention with query/key norms, partial rotary and an output gate."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, 2 * heads * dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv * dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, c.hidden_size, bias=False)
        self.q_norm = Norm(dim, c.rms_norm_eps)
        self.k_norm = Norm(dim, c.rms_norm_eps)

    def project(self, x: Tensor, offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, heads, T, dim] and gate [B, T, heads * dim]; row t stands at position t + offset."""
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * self.c.head_dim).chunk(2, -1)
        k, v = (p(x).view(batch, length, -1, self.c.head_dim).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k.transpose(1, 2)).transpose(1, 2)
        cos, sin = rotary(self.c, torch.arange(offset, offset + length, device=x.device))
        return rotate(q, cos, sin), rotate(k, cos, sin), v, gate.reshape(batch, length, -1)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate and project attention's output [B, heads, T, dim]."""
        batch, _, length, _ = out.shape
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1) * torch.sigmoid(gate))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x)
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), gate)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm decoder layer with either mixer.

    The parts around the delta rule are methods of their own: `torch.compile` then serves all layers with one graph each.
    """

    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = LinearAttention(c)
        self.mlp = MLP(c)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.linear_attn.before(self.input_layernorm(x))

    def after(self, x: Tensor, out: Tensor, z: Tensor) -> Tensor:
        x = x + self.linear_attn.after(out, z)
        return x + self.mlp(self.post_attention_layernorm(x))

    def attention(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "full_attention":
            return self.attention(x)
        q, k, v, g, beta, z = self.before(x)
        return self.after(x, delta_rule(q, k, v, g, beta), z)


class MTP(nn.Module):
    """The multi-token-prediction head, run as the recursive draft chain it is at inference."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.pre_fc_norm_embedding = Norm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([Block(c, "full_attention")])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.blocks: dict[int, BlockMask] = {}

    def prepare(self, length: int, steps: int) -> None:
        """Use FlexAttention, for training on CUDA with sequences of this length only."""
        self.blocks = {step: chain_blocks(length, step, "cuda") for step in range(1, steps)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        """Attention of T chain rows over their (step + 1) T keys."""
        if self.blocks:
            return flex_attention(q, k, v, block_mask=self.blocks[step], enable_gqa=True)
        mask = chain_mask(q.shape[2], step, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def forward(self, hidden: Tensor, embeddings: list[Tensor]) -> list[Tensor]:
        """Outputs y_1 .. y_J, each [B, T, D].

        Args:
            hidden: The trunk's hidden states after its last norm, [B, T, D].
            embeddings: For step j = 1 .. J the embeddings of the tokens at t + j, [B, T, D].

        Row t of step j stands at position t + j - 1 and attends to the step-1 keys of positions up to its root t
        (those rows have the trunk's hidden states, as committed rows do) and to its own chain's rows of later steps.
        """
        block, outputs = self.layers[0], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step, embedding in enumerate(embeddings):
            joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
            x = self.fc(joined)
            q, k, v, gate = block.self_attn.project(block.input_layernorm(x), offset=step)
            keys.append(k)
            values.append(v)
            if step == 0:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                out = self.attend(q, torch.cat(keys, 2), torch.cat(values, 2), step)
            x = x + block.self_attn.finish(out, gate)
            x = x + block.mlp(block.post_attention_layernorm(x))
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Boolean [T, (step + 1) T]: causal over the first T keys, the diagonal of each later step's T keys."""
    row = torch.arange(length, device=device)
    causal = row[:, None] >= row[None]
    return torch.cat([causal] + [row[:, None] == row[None]] * step, 1)


def chain_blocks(length: int, step: int, device: str) -> BlockMask:
    """`chain_mask` in FlexAttention's sparse form."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k < length, q >= k, q == k % length)

    return create_block_mask(visible, None, None, length, (step + 1) * length, device=device)


class Trunk(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList([Block(c, kind) for kind in c.layer_types])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states after the last norm, [B, T, D]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    """Trunk (`model.*`), MTP head (`mtp.*`) and tied LM head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.model = Trunk(c)
        self.mtp = MTP(c)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise: matrices N(0, 1/sqrt(fan in)), output projections smaller, decay memories from 1 to about 500 tokens."""
        for name, p in self.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                # softplus(dt_bias) log-uniform in [1e-3, 1e-1], as Mamba-2 starts.
                dt = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith("embed_tokens.weight"):
                p.normal_(std=0.05)
            elif p.dim() >= 2:
                std = p[0].numel() ** -0.5
                small = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                p.normal_(std=std * (0.25 if small else 1.0))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))
