"""Bytes of a model's weights: from the headers of its files, from its index, or counted from its sizes."""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from treewy.errors import RequestError
from treewy.planner.model import ModelSpec

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
HEAD_PREFIX, HEAD_MARKER = "mtp.", "mtp.fc.weight"
# The engine decodes text only: it loads no vision tower.
VISION_PREFIXES = ("model.visual.", "visual.")
# Stored in one of these, a weight is cast to the model's dtype at load; anything else is quantised and stays.
CAST = ("F64", "F32", "F16", "BF16")


class Weights(NamedTuple):
    """Bytes of the language model and of its multi-token-prediction head, and where the figures come from."""

    target: int
    head: int
    source: str


class Parameters(NamedTuple):
    """Parameter counts of the language model and of its head."""

    target: int
    head: int


class StoredTensor(NamedTuple):
    """One entry of a weight file's header."""

    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int


def count_parameters(spec: ModelSpec) -> Parameters:
    """Return the parameters a model of these sizes has, every tensor counted."""
    h, mlp, norms = spec.hidden_size, _mlp_parameters(spec), 2 * spec.hidden_size
    softmax_layer = _attention_parameters(spec) + mlp + norms
    linear_layer = _linear_parameters(spec) + mlp + norms
    embeddings = spec.vocab_size * h * (1 if spec.tied else 2)
    target = embeddings + h + spec.num_linear_layers * linear_layer + spec.num_attention_layers * softmax_layer
    # The joining projection, the norms before it and after the layers; embedding and LM head are the target's.
    head = 2 * h * h + 3 * h + spec.num_head_layers * softmax_layer if spec.num_head_layers else 0
    return Parameters(target, head)


def counted(spec: ModelSpec, dtype: str) -> Weights:
    """Return the bytes of an unquantised model of these sizes, without a vision tower."""
    size, parameters = DTYPE_BYTES[dtype], count_parameters(spec)
    return Weights(parameters.target * size, parameters.head * size, f"counted from the config, in {dtype}")


def measured(tensors: Mapping[str, StoredTensor], dtype: str, *, tied: bool) -> Weights:
    """Return the bytes that the text model and its head take once loaded in `dtype`."""
    target = head = 0
    for name, tensor in tensors.items():
        if name.startswith(VISION_PREFIXES) or (tied and name == "lm_head.weight"):
            continue
        size = prod(tensor.shape) * DTYPE_BYTES[dtype] if tensor.dtype in CAST else tensor.stored_bytes
        if name.startswith(HEAD_PREFIX):
            head += size
        else:
            target += size
    return Weights(target, head, f"headers of the weight files, loaded in {dtype}")


def head_layers(names: Iterable[str]) -> int:
    """Return the layers of the multi-token-prediction head among these tensors. The files decide, not the config."""
    names = list(names)
    found = {name.split(".")[2] for name in names if name.startswith(f"{HEAD_PREFIX}layers.")}
    return len(found) if HEAD_MARKER in names else 0


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a safetensors file declares, without reading any.

    Raises:
        RequestError: the file is not there, truncated or no safetensors file.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            # A header beyond the file is a broken length: reading it could take all memory.
            if size > file.stat().st_size:
                raise ValueError("its header is cut off")
            header: dict[str, Any] = json.loads(stream.read(size))
        tensors = {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if file.stat().st_size < 8 + size + end:
            raise ValueError("its tensors are cut off")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RequestError(
            f"A weight file must be whole and readable; {file} is not: {error}. Download it again."
        ) from error
    return tensors


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), int(end) - int(start))


def _linear_parameters(spec: ModelSpec) -> int:
    h, values, channels = spec.hidden_size, spec.num_value_heads * spec.value_dim, spec.conv_channels
    projections = h * (channels + values + 2 * spec.num_value_heads) + values * h
    return projections + channels * spec.conv_width + 2 * spec.num_value_heads + spec.value_dim


def _attention_parameters(spec: ModelSpec) -> int:
    h, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return h * queries * (3 if spec.output_gate else 2) + 2 * h * keys + 2 * spec.head_dim


def _mlp_parameters(spec: ModelSpec) -> int:
    h, mlp = spec.hidden_size, spec.mlp
    dense = 3 * h * mlp.width
    if not mlp.num_experts:
        return dense
    # Router, routed experts, and the shared expert with its gate.
    return h * mlp.num_experts + 3 * h * mlp.expert_width * mlp.num_experts + dense + h
