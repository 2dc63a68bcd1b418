"""The step that DESIGN.md shows is the engine's own: it runs, and delivers the tokens of decoding without drafts."""

import re
from pathlib import Path

import torch

from drafters import ScriptedDrafter
from toy_oracle import continuation
from toy_steps import feed, make_pool
from treewy.accept import greedy
from treewy.cache import Batch
from treewy.draft import Committed, Root
from treewy.model import ToyTarget
from treewy.packed import pack
from treewy.tree import DraftTree

DESIGN = Path(__file__).parent.parent / "DESIGN.md"


def test_the_step_of_the_design_page() -> None:
    (code,) = re.findall(r"```python\n(def speculate.*?)```", DESIGN.read_text(), flags=re.DOTALL)
    names = {"Batch": Batch, "Committed": Committed, "Root": Root, "greedy": greedy, "pack": pack, "torch": torch}
    exec(code, names)
    target, prompt = ToyTarget(seed=1), [40, 2]
    script = continuation(target, prompt, 40)
    cache, drafter = make_pool(target), ScriptedDrafter([script], right=0.8)
    slot = cache.allocate()
    drafter.allocate(slot)
    feed(target, cache, slot, prompt)
    hidden = torch.zeros(2, target.config.hidden, dtype=target.dtype)
    drafter.observe([Committed(slot, hidden, script[1:3], prompt[0])])
    tokens, steps = [script[2]], 0
    while len(tokens) < 30:
        tokens += names["speculate"](slot, tokens[-1], DraftTree.from_widths([2, 1, 1]), target, drafter, cache)
        steps += 1
    assert tokens[:30] == script[2:32]
    assert steps < 25


def test_every_decision_is_in_the_index() -> None:
    decisions = {file.name for file in (DESIGN.parent / "docs" / "decisions").glob("[0-9]*.md")}
    assert decisions == set(re.findall(r"\(docs/decisions/(.*?\.md)\)", DESIGN.read_text()))


def test_every_file_of_the_plugin_is_on_the_map() -> None:
    """The others are few and old; this room grows."""
    text = DESIGN.read_text()
    files = {file.name for file in (DESIGN.parent / "src" / "treewy" / "vllm_plugin").glob("*.py")}
    assert {name for name in files - {"__init__.py"} if not re.search(rf"\b{re.escape(name)}", text)} == set()
