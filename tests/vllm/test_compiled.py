"""Engines that are compiled, as vLLM does it if nobody says anything: texts and states are those of the others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chains import assert_alike, drafting
from test_chains import TEXT_REQUESTS, undrafted
from trees import growing

from engine import Report, Run
from tolerances import KERNEL_EXACT

KINDS: dict[str, Callable[[str], Run]] = {
    "chain": lambda folder: drafting(folder, "ring"),
    "tree": lambda folder: growing(folder, "reconstruct", (2, 2), probe="probes:chains"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_states_are_as_in_other_engines(
    kind: str, model: Callable[..., str], execute: Callable[[Run], Report], tmp_path: Path
) -> None:
    folder, compiles = model("dense"), {"TORCH_COMPILE_DISABLE": None, "VLLM_CACHE_ROOT": str(tmp_path)}
    run = replace(KINDS[kind](folder), arguments={"enforce_eager": False}, environment=compiles)
    report = execute(replace(run, rounds=[TEXT_REQUESTS]))
    for part in ("backbone", "eagle_head"):  # the model, and the head that drafts
        assert report.lines(rf"\[{part}\] saved AOT compiled function")
    (served,) = report.rounds
    assert served.probed["num_checks"] > 100
    assert served.probed["largest"] <= KERNEL_EXACT
    assert served.counters["spec_decode_num_accepted_tokens"] > 50
    assert_alike(execute(undrafted(folder)).rounds[0].outputs, served.outputs)
