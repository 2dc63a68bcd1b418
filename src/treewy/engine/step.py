"""One step: draft, verify, accept, commit. The same few lines for any batch, tree and policy."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from treewy.accept import Accepted, Choice, choose_sampled, walk, walk_choices
from treewy.cache import Batch, CachePool, get_policy
from treewy.cache.step import Pending
from treewy.draft import Committed, Draft, Drafter, Root
from treewy.draft.shape import cut_to_depth
from treewy.engine.request import Request
from treewy.engine.stream import StreamEvent, TokenKind, TokenLogprobs
from treewy.errors import TreeError
from treewy.model import Target, Verified
from treewy.packed import PackedTree, pack
from treewy.sampling import log_probabilities
from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree

PREFILL_POLICY = "reconstruct"
# Stands for a token that could not be chosen: no id, so it never matches a draft.
NOT_FINITE = -1


class Machine(NamedTuple):
    """What a step works with."""

    target: Target
    drafter: Drafter
    cache: CachePool
    eos_ids: frozenset[int]


def speculate(machine: Machine, requests: Sequence[Request]) -> list[StreamEvent]:
    """Advance every request by one draft tree; return the tokens each gained.

    Verify reads the committed memory, commit is the only write, and what is pending dies with the step.
    """
    target, drafter, cache, _ = machine
    drafts = drafter.propose([_root(request) for request in requests])
    trees = [draft.tree for draft in drafts]
    tokens = _drafted(drafts, requests, machine)
    packed = pack(trees, device=target.device)
    verified = target.verify(Batch(packed, _ids(tokens, target), _slots(requests)), cache)
    choices = _choices(verified.logits)

    starts = packed.starts
    events, paths = [], []
    for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        tree, span = draft.tree, slice(starts[i], starts[i + 1])
        accepted = _accept(request, draft, verified.logits[span], choices[span])
        sound = accepted.cut(len(accepted.tokens) - (accepted.tokens[-1] == NOT_FINITE))
        event = deliver(request, sound.tokens, _kinds(accepted, tree), machine.eos_ids)
        cut = sound.cut(len(event.token_ids))
        if cut.tokens:
            request.stats.count_step(tree, cut.path, len(cut.tokens), was_cut=cut is not accepted)
        events.append(_recorded(event, request, verified.logits, [starts[i] + row for row in cut.path]))
        paths.append(cut.path)
    _measure(requests, packed, verified.pending, cache)
    cache.commit(verified.pending, paths)
    drafter.observe(_committed(requests, verified, packed, paths))
    return events


def prefill(machine: Machine, requests: Sequence[Request], chunk: int) -> list[StreamEvent]:
    """Run the next `chunk` prompt tokens of each request as a chain, all of it committed.

    A request whose prompt is done gets its first token.
    """
    target, drafter, cache, _ = machine
    parts = [request.prompt[request.prefilled : request.prefilled + chunk] for request in requests]
    packed = pack([DraftTree.chain(len(part) - 1) for part in parts], device=target.device)
    last_rows = torch.tensor(packed.starts[1:], device=target.device) - 1
    tokens = _ids([token for part in parts for token in part], target)
    batch = Batch(packed, tokens, _slots(requests), last_rows, get_policy(PREFILL_POLICY))
    verified = target.verify(batch, cache)
    paths = [range(len(part)) for part in parts]
    cache.commit(verified.pending, paths)

    events, following = [], []
    choices = _choices(verified.logits)
    for place, (request, part) in enumerate(zip(requests, parts, strict=True)):
        request.prefilled += len(part)
        if request.prefilled < len(request.prompt):
            following.append(request.prompt[request.prefilled])
            continue
        row = slice(place, place + 1)
        token = _accept(request, Draft(DraftTree([-1], [part[-1]])), verified.logits[row], choices[row]).tokens[0]
        first = [token] if token != NOT_FINITE else []
        following.append(token if first else part[-1])
        event = deliver(request, first, [TokenKind.PREFILL], machine.eos_ids)
        events.append(_recorded(event, request, verified.logits, [place] if first else []))
        _keep_peak(request, cache.slot_bytes(_slot(request)))
    hidden = verified.hidden
    rows = zip(requests, parts, following, packed.starts, strict=False)
    drafter.observe(
        [Committed(_slot(r), hidden[at : at + len(part)], [*part[1:], token], part[0]) for r, part, token, at in rows]
    )
    return events


def deliver(
    request: Request, tokens: Sequence[int], kinds: Sequence[TokenKind], eos_ids: frozenset[int]
) -> StreamEvent:
    """Append tokens to a request up to wherever it ends: end of text, a stop string, or its limit.

    No token at all means that the target's logits were not finite: the request ends in error, with what it has.
    """
    if not tokens:
        request.finish_reason = "error"
        request.detokenizer.flush()
        return StreamEvent(request.id, [], [], [], request.finish_reason)
    pieces: list[str] = []
    for token in tokens:
        request.output.append(token)
        ends = token in eos_ids and not request.params.ignore_eos
        pieces.append("" if ends else request.detokenizer.push(token))
        if ends:
            request.finish_reason = "eos"
        elif request.detokenizer.stopped:
            request.finish_reason = "stop"
        elif request.num_left == 0:
            request.finish_reason = "length"
        if request.finish_reason:
            pieces[-1] += request.detokenizer.flush()
            # A stop string may have been complete but for what was held back.
            request.finish_reason = "stop" if request.detokenizer.stopped else request.finish_reason
            break
    count, stats = len(pieces), request.stats
    stats.kinds.extend(kinds[:count])
    stats.last_token = perf_counter()
    stats.first_token = stats.first_token or stats.last_token
    return StreamEvent(request.id, list(tokens[:count]), list(kinds[:count]), pieces, request.finish_reason)


def _root(request: Request) -> Root:
    # A step delivers up to depth + 1 tokens: deeper rows than the request can still use are not drafted.
    return Root(_slot(request), request.output[-1], cut_to_depth(request.shape, request.num_left - 1), request.draws)


def _accept(request: Request, draft: Draft, logits: Float[Tensor, "T vocab"], choices: list[int]) -> Accepted:
    """Apply the request's rule to one tree; a row whose logits say nothing is followed by `NOT_FINITE`."""
    if request.law is None:
        return walk_choices(draft.tree, choices)
    return walk(draft.tree, lambda row: _sampled(request, draft, row, logits[row : row + 1], choices[row]))


def _sampled(request: Request, draft: Draft, row: int, logits: Float[Tensor, "1 vocab"], choice: int) -> Choice:
    """Choose what follows one row: laws are computed of the rows on the way only."""
    assert request.law is not None
    if choice == NOT_FINITE:
        return Choice(NOT_FINITE, None)
    target = request.law.probabilities(logits)[0].cpu().numpy()
    drawn_from = draft.laws.get(row)
    drawn_from = None if drawn_from is None else drawn_from.cpu().numpy()
    return choose_sampled(draft.tree, row, target, drawn_from, request.coin)


def _choices(logits: Tensor) -> list[int]:
    """Return the most likely token after each row, `NOT_FINITE` where the logits say nothing."""
    chosen = logits.argmax(dim=-1)
    finite = logits.gather(-1, chosen[:, None]).squeeze(-1).isfinite()
    return torch.where(finite, chosen, NOT_FINITE).tolist()


def _drafted(drafts: Sequence[Draft], requests: Sequence[Request], machine: Machine) -> list[int]:
    """Return the tokens of all rows, checked: a wrong root would be a wrong text, not just a wrong draft."""
    drafter, vocab_size = type(machine.drafter).__name__, machine.target.vocab_size
    trees = [draft.tree for draft in drafts]
    roots = [tree.tokens[0] if tree.tokens else None for tree in trees]
    wanted = [request.output[-1] for request in requests]
    if roots != wanted:
        raise TreeError(
            f"A drafter must return one tree per root, in order, root token first; {drafter} was given roots {wanted} and "
            f"returned {roots}. Mend the drafter."
        )
    tokens = [token for tree in trees for token in tree.tokens or ()]
    # An id outside the vocabulary would be read past the end of the embedding.
    if max(tokens) >= vocab_size:
        raise TreeError(
            f"Drafts must lie in 0..{vocab_size - 1}; {drafter} drafted {max(tokens)}. "
            "Use a drafter with the target's vocabulary."
        )
    return tokens


def _kinds(accepted: Accepted, tree: DraftTree) -> list[TokenKind]:
    last = TokenKind.BONUS if accepted.is_bonus else TokenKind.RECOVERED
    if tree.num_drafts == 0:
        last = TokenKind.PLAIN
    return [TokenKind.ACCEPTED] * (len(accepted.tokens) - 1) + [last]


def _committed(
    requests: Sequence[Request], verified: Verified, packed: PackedTree, paths: Sequence[Sequence[int]]
) -> list[Committed]:
    committed = []
    for request, start, path in zip(requests, packed.starts, paths, strict=False):
        if not path:
            continue
        rows = torch.tensor(list(path), device=verified.hidden.device) + start
        root, *tokens = request.output[-len(path) - 1 :]
        committed.append(Committed(_slot(request), verified.hidden[rows], tokens, root))
    return committed


def _recorded(event: StreamEvent, request: Request, logits: Tensor, rows: list[int]) -> StreamEvent:
    """Record what the request wants to know of its new tokens, from the rows they follow; return the event with it."""
    params, stats = request.params, request.stats
    if not rows:
        return event
    if params.record_gaps:
        top = logits[rows].double().topk(2, dim=-1).values
        stats.gaps += (top[:, 0] - top[:, 1]).tolist()
    if params.logprobs is None:
        return event
    logprobs = log_probabilities(logits[rows])
    best = logprobs.topk(min(params.logprobs, logprobs.shape[-1]), dim=-1)
    new = [
        TokenLogprobs(float(row[token]), dict(zip(ids, values, strict=True)))
        for row, token, ids, values in zip(
            logprobs, event.token_ids, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
    stats.logprobs += new
    return event._replace(logprobs=new)


def _measure(requests: Sequence[Request], packed: PackedTree, pending: Pending, cache: CachePool) -> None:
    """Keep each sequence's peak: its slot's bytes and its rows' share of what the step holds.

    Prefill is measured by what it leaves: how much its chunks hold meanwhile is the chunk's choice, not the tree's.
    """
    held = pending.bytes()
    for request, size in zip(requests, packed.sizes, strict=True):
        share = size / packed.num_rows
        committed = cache.slot_bytes(_slot(request))
        _keep_peak(request, tuple(mine + round(part * share) for mine, part in zip(committed, held, strict=True)))


def _keep_peak(request: Request, state_conv_kv: Sequence[int]) -> None:
    stats = request.stats
    state, conv, kv = state_conv_kv
    stats.state_bytes = max(stats.state_bytes, state)
    stats.conv_bytes = max(stats.conv_bytes, conv)
    stats.kv_bytes = max(stats.kv_bytes, kv)


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _slots(requests: Sequence[Request]) -> tuple[int, ...]:
    return tuple(_slot(request) for request in requests)


def _ids(tokens: Sequence[int], target: Target) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=target.device)
