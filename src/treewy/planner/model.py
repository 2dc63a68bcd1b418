"""Sizes of a hybrid language model, read from its config.json. Plain JSON: neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from treewy.errors import RequestError, UnsupportedError

# Text model types whose linear layers are Gated DeltaNet with the memory described here.
SUPPORTED = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
LINEAR, ATTENTION = "linear_attention", "full_attention"
STATE_DTYPES = ("float32", "bfloat16", "float64")


class MLPSpec(NamedTuple):
    """Sizes of a layer's feed-forward part: dense, or a mixture of experts with one shared expert.

    Attributes:
        width: Inner width of the dense part or of the shared expert.
        num_experts: Routed experts; 0 for a dense part.
        expert_width: Inner width of one routed expert.
    """

    width: int
    num_experts: int = 0
    expert_width: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """What memory depends on: layer counts, heads and widths.

    Attributes:
        num_head_layers: Attention layers of the multi-token-prediction head; 0 without a head.
        num_heads: Query heads of a softmax layer.
        output_gate: Whether a softmax layer projects a gate beside each query.
        tied: Whether the LM head is the embedding.
        state_dtype: What the checkpoint asks for its recurrent states.
    """

    vocab_size: int
    hidden_size: int
    num_linear_layers: int
    num_attention_layers: int
    num_head_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: MLPSpec
    output_gate: bool
    tied: bool
    max_len: int
    state_dtype: str

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def shard(self, tp: int) -> "ModelSpec":
        """Return one GPU's share of the heads; KV heads are repeated when there are fewer of them than GPUs.

        Raises:
            RequestError: the heads do not divide.
        """
        if tp < 1:
            raise RequestError(f"Tensor parallelism must be over at least one GPU; got tp {tp}. Use 1 for none.")
        heads = {"key": self.num_key_heads, "value": self.num_value_heads, "query": self.num_heads}
        for name, count in heads.items():
            if count % tp:
                raise RequestError(
                    f"Heads must divide evenly over the GPUs; {count} {name} heads do not over tp {tp}. Use a tp that "
                    f"divides {', '.join(str(x) for x in heads.values())}."
                )
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise RequestError(
                f"KV heads must divide over the GPUs, or the GPUs over them; got {self.num_kv_heads} KV heads and tp {tp}. "
                "Use another tp."
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // tp,
            num_value_heads=self.num_value_heads // tp,
            num_heads=self.num_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str) -> "ModelSpec":
        """Read a config.json, flat or with a nested text_config.

        Args:
            config: Its content.
            where: What to call it in errors.

        Raises:
            UnsupportedError: the model is not a hybrid with Gated DeltaNet layers.
            RequestError: a value is missing or not of its kind.
        """
        nested = config.get("text_config")
        text = _Reader(dict(config) | dict(nested) if isinstance(nested, dict) else dict(config), where)
        kind = text.values.get("model_type")
        if kind not in SUPPORTED:
            raise UnsupportedError(
                f"A model to plan for must be of a type with Gated DeltaNet layers, {', '.join(SUPPORTED)}; {where} is "
                f"{kind!r}. Choose another model."
            )
        layers = _layer_types(text)
        spec = cls(
            vocab_size=text.count("vocab_size"),
            hidden_size=text.count("hidden_size"),
            num_linear_layers=layers.count(LINEAR),
            num_attention_layers=layers.count(ATTENTION),
            num_head_layers=text.count("mtp_num_hidden_layers", text.count("num_nextn_predict_layers", 0)),
            num_key_heads=text.count("linear_num_key_heads"),
            num_value_heads=text.count("linear_num_value_heads"),
            key_dim=text.count("linear_key_head_dim"),
            value_dim=text.count("linear_value_head_dim"),
            conv_width=text.count("linear_conv_kernel_dim"),
            num_heads=text.count("num_attention_heads"),
            num_kv_heads=text.count("num_key_value_heads"),
            head_dim=text.count("head_dim"),
            mlp=_mlp(text),
            output_gate=bool(text.values.get("attn_output_gate", True)),
            tied=bool(text.values.get("tie_word_embeddings", False)),
            max_len=text.count("max_position_embeddings"),
            state_dtype=_state_dtype(text),
        )
        if not layers.count(LINEAR):
            raise UnsupportedError(f"A hybrid must have linear layers; {where} has none. There is nothing to plan.")
        if spec.num_value_heads % spec.num_key_heads:
            raise RequestError(
                f"Value heads must be a multiple of key heads; {where} has {spec.num_value_heads} and "
                f"{spec.num_key_heads}. Mend the config."
            )
        return spec


class _Reader(NamedTuple):
    """A config's values, and what to call it."""

    values: dict[str, Any]
    where: str

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number: positive, or the default if the key is absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        least = 1 if default is None else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(
                f"A config must give {key} as a whole number of at least {least}; that of {self.where} has {value!r}. "
                "Use the checkpoint's own config.json."
            )
        return value


def _layer_types(text: _Reader) -> list[str]:
    num_layers = text.count("num_hidden_layers")
    types = text.values.get("layer_types")
    if types is None:
        every = text.count("full_attention_interval")
        return [LINEAR if (index + 1) % every else ATTENTION for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(x not in (LINEAR, ATTENTION) for x in types):
        raise RequestError(
            f"layer_types must name {num_layers} layers, each {LINEAR} or {ATTENTION}; that of {text.where} does not. "
            "Use the checkpoint's own config.json."
        )
    return types


def _mlp(text: _Reader) -> MLPSpec:
    num_experts = text.count("num_experts", 0)
    if not num_experts:
        return MLPSpec(text.count("intermediate_size"))
    if text.values.get("mlp_only_layers") or text.count("decoder_sparse_step", 1) != 1:
        raise UnsupportedError(
            f"Every layer of a mixture of experts must have experts; {text.where} has dense layers among them. "
            "Plan from a checkpoint folder of another model."
        )
    return MLPSpec(
        text.count("shared_expert_intermediate_size"), num_experts, expert_width=text.count("moe_intermediate_size")
    )


def _state_dtype(text: _Reader) -> str:
    name = str(text.values.get("mamba_ssm_dtype") or "float32").removeprefix("torch.")
    if name not in STATE_DTYPES:
        raise RequestError(
            f"Recurrent states must be {' or '.join(STATE_DTYPES[:2])}; mamba_ssm_dtype of {text.where} is {name!r}. "
            "Mend the config."
        )
    return name
