"""Engines with draft trees, requests that they are tried with, and what became of their drafts."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

from chains import greedy, prompt

from engine import Request, Round, Run, mtp
from treewy.tree import DraftTree

# Levels of different widths, one of them without branches.
WIDTHS = (3, 1, 2)
NUM_DRAFTS = DraftTree.from_widths(WIDTHS).num_rows - 1
# Tokens of a step: three whole trees and one token more, so that a fourth request gets a part of its tree.
BUDGET = 3 * (1 + NUM_DRAFTS) + 1
LENGTH = 300


def growing(
    folder: str, commit: str, widths: tuple[int, ...], *, accepted: list[float] | None = None, **options: Any
) -> Run:
    """Return an engine that drafts trees under a policy, with every commit checked, and without rounds."""
    drafts = DraftTree.from_widths(widths).num_rows - 1
    asked = {"mamba_state_commit": commit, "draft_tree_widths": list(widths), "check_every": 1}
    # vLLM wants a rate for every draft; those behind the deepest level are nobody's.
    rates = None if accepted is None else accepted + [0.0] * (drafts - len(accepted))
    whole = {"model": folder, "rounds": [], "runner": "v2", "probe": "probes:trees"}
    return Run(**whole | {"speculative": mtp(drafts, accepted=rates, **asked)} | options)


def crowd() -> list[Request]:
    """Requests of other lengths each that join over twelve steps, some of which are aborted; three prompts are one token."""
    draw = random.Random(5)
    joining = [
        greedy(prompt(200 + i, draw.randint(2, 70)), draw.randint(1, 10), joins=draw.randint(0, 12)) for i in range(10)
    ]
    joining += [greedy([7 + i], 6, joins=2 + 3 * i) for i in range(3)]
    cut = [greedy(prompt(230 + i, 15), 40, joins=i, aborts=i + 5) for i in range(3)]
    return joining + cut


def ending() -> list[Request]:
    """Requests that reach the longest context, one right away; for their last trees there is no room."""
    return [greedy(prompt(240 + i, LENGTH - left), 40) for i, left in enumerate((1, 6, 11, 20))]


def asking(sampling: dict[str, Any], seed: int, length: int = 12, num_tokens: int = 12) -> Request:
    """Return a request with sampling parameters."""
    request = greedy(prompt(seed, length), num_tokens)
    return replace(request, sampling=request.sampling | sampling)


def particular(bad_words: list[str]) -> list[Request]:
    """Greedy requests whose tokens depend on their past or on more than logits, and one of which neither is true.

    Args:
        bad_words: What the first of `test_chains.TEXT_REQUESTS` would say.
    """
    asked = (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"structured_outputs": {"regex": r"(t[0-9][0-9]?){9}"}, "ignore_eos": False},
        {"min_tokens": 6, "stop_token_ids": list(range(0, 127, 3))},
        {"allowed_token_ids": list(range(0, 127, 4))},
    )
    first = asking({"bad_words": bad_words}, 0, 30, 16)
    return [first, asking({}, 1, 4), *(asking(sampling, 250 + i) for i, sampling in enumerate(asked))]


def drawn() -> list[Request]:
    """Requests of seeds; how they are drawn differs."""
    asked = ({}, {"top_k": 20}, {"top_k": 40, "top_p": 0.8, "temperature": 1.2}, {"repetition_penalty": 1.3})
    return [asking({"temperature": 0.7, "seed": i} | sampling, 260 + i) for i, sampling in enumerate(asked)]


def accepted_nodes(served: Round, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the depth of each accepted draft of a round, and the place of it among its siblings."""
    tree = DraftTree.from_widths(widths)
    found = []
    for size, path in served.probed["paths"]:
        assert path[0] == 0
        assert max(path) < size
        for parent, node in pairwise(path):
            assert tree.parents[node] == parent
            found.append((int(tree.depth[node]), list(tree.children(parent)).index(node)))
    return found
