"""Which requests of a real batch verify: those that decode, and prompts whose last token runs like a decode."""

from types import SimpleNamespace

import numpy as np

from treewy.vllm_plugin import compat, versions

# Of each: whether it prefills, tokens scheduled, drafts among them, tokens before.
DECODES = (False, 4, 3, 20)
UNDRAFTED = (False, 1, 0, 20)
PADDED_TAIL = (True, 4, 3, 16)
PADDED_PROMPT = (True, 4, 3, 0)
TAIL = (True, 1, 0, 16)
PROMPT = (True, 4, 0, 0)
WAITS = (False, 0, 0, 20)


def drafted(*requests: tuple[bool, int, int, int], runs_as_decode: bool = True) -> list[int]:
    """Return which of a batch's requests verify, as the compat module of the installed version has it."""
    prefilling, scheduled, drafts, computed = (np.array(column) for column in zip(*requests, strict=True))
    one_token = prefilling & (scheduled - drafts == 1) & (computed > 0)
    batch = SimpleNamespace(
        num_reqs=len(requests),
        is_prefilling_np=prefilling,
        num_scheduled_tokens=np.append(scheduled, [7, 7]),
        num_draft_tokens_per_req=drafts if drafts.any() else None,
        num_computed_tokens_np=computed,
        prefill_runs_as_decode_np=one_token if prefilling.any() and runs_as_decode else None,
    )
    return compat.names().drafted_rows(batch).tolist()


def test_who_verifies() -> None:
    """Faults D01 and D05: a prompt's last token, alone or with placeholders, and no other part of one."""
    assert drafted(DECODES, PADDED_TAIL, PADDED_PROMPT, PROMPT, UNDRAFTED, WAITS) == [0, 1, 2, 4]
    assert drafted(PROMPT, PADDED_PROMPT, runs_as_decode=False) == [1]
    assert drafted(UNDRAFTED, PROMPT, DECODES) == [0, 2]
    assert drafted(PROMPT) == []


def test_a_last_token_alone() -> None:
    """Fault D01: it runs like a decode, whoever is beside it; 0.26 runs it as a prompt."""
    like_a_decode = versions.installed() >= (0, 28, 0)
    assert drafted(TAIL, PROMPT) == [0] * like_a_decode
    assert drafted(DECODES, TAIL) == [0, *[1] * like_a_decode]
