"""The two layouts of a mixture's experts: fused tensors over all experts, or one tensor per expert and projection.

Fused: `experts.gate_up_proj` [E, 2 I, hidden], gates first, and `experts.down_proj` [E, hidden, I].
Single: `experts.<e>.{gate,up}_proj.weight` [I, hidden] and `experts.<e>.down_proj.weight` [hidden, I].
"""

import re
from collections.abc import Iterable, Mapping

import torch

from treewy.shapes import Tensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SINGLE = re.compile(r"(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight")
_FUSED = re.compile(r"(?P<stem>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)")

Shapes = dict[str, tuple[int, ...]]


def any_single(names: Iterable[str]) -> bool:
    """Return whether any expert has tensors of its own."""
    return any(_SINGLE.fullmatch(name) for name in names)


def incomplete(names: Iterable[str]) -> list[str]:
    """Return the tensors that single experts lack: each mixture needs all projections of experts 0 to its highest."""
    names = set(names)
    num_experts: dict[str, int] = {}
    for match in filter(None, map(_SINGLE.fullmatch, names)):
        num_experts[match["stem"]] = max(num_experts.get(match["stem"], 0), int(match["expert"]) + 1)
    wanted = {name for stem, number in num_experts.items() for name in _single_names(stem, number)}
    return sorted(wanted - names)


def doubled(names: Iterable[str]) -> list[str]:
    """Return the fused tensors of mixtures that have single experts as well."""
    names = set(names)
    stems = {match["stem"] for match in map(_SINGLE.fullmatch, names) if match}
    return sorted(name for name in names if (match := _FUSED.fullmatch(name)) and match["stem"] in stems)


def single_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of a module's state under the names of single experts."""
    single: Shapes = {}
    for name, shape in shapes.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            single[name] = shape
            continue
        halves = ("gate_proj", "up_proj") if match["projection"] == "gate_up_proj" else ("down_proj",)
        own = (shape[1] // len(halves), *shape[2:])
        single |= {f"{match['stem']}.{e}.{half}.weight": own for e in range(shape[0]) for half in halves}
    return single


def fused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with single experts joined; complete mixtures only, see `incomplete`."""
    matches = {name: _SINGLE.fullmatch(name) for name in weights}
    joined = {name: weights[name] for name, match in matches.items() if match is None}
    for stem in {match["stem"] for match in matches.values() if match}:
        number = 1 + max(int(match["expert"]) for match in matches.values() if match and match["stem"] == stem)
        gate, up, down = (
            torch.stack([weights[f"{stem}.{e}.{projection}.weight"] for e in range(number)])
            for projection in PROJECTIONS
        )
        joined[f"{stem}.gate_up_proj"], joined[f"{stem}.down_proj"] = torch.cat([gate, up], dim=1), down
    return joined


def _single_names(stem: str, num_experts: int) -> list[str]:
    return [f"{stem}.{e}.{projection}.weight" for e in range(num_experts) for projection in PROJECTIONS]
