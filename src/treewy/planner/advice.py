"""What the figures mean, in plain words. Claims follow from the arithmetic; none is about speed."""

from treewy.planner.memory import PerSequence

# A gain in requests up to this share is not worth a change of policy.
NEGLIGIBLE = 0.05


def advise(
    memory: PerSequence,
    fits: dict[str, int],
    *,
    rows: int,
    requests: int | None,
    short: int,
    has_head: bool,
    beyond: int,
) -> str:
    """Return the recommendation.

    Args:
        memory: Bytes of one sequence.
        fits: Requests by policy.
        rows: Rows of the draft tree.
        requests: Requests wanted at once, if known.
        short: Bytes per GPU by which weights and reserve miss; 0 or less if they fit.
        has_head: Whether the checkpoint has a head to draft with.
        beyond: Tokens of context that the model's configuration does not allow for.
    """
    sentences = [_recommend(memory, fits, rows, requests, short)]
    if rows > 1 and not has_head:
        sentences.append("The checkpoint has no multi-token-prediction head: add what another drafter holds.")
    if beyond:
        sentences.append(f"The context is {beyond} tokens beyond what the model's configuration allows.")
    return " ".join(sentences)


def _recommend(memory: PerSequence, fits: dict[str, int], rows: int, requests: int | None, short: int) -> str:
    none, store_all, reconstruct = (fits[policy] for policy in ("none", "store_all", "reconstruct"))
    if short > 0:
        return (
            f"The weights and the reserve take {humanise(short)} more than each GPU may use. Spread them over more GPUs (tp), "
            "take a larger GPU, or a quantised checkpoint."
        )
    if rows == 1:
        return f"Nothing is drafted: {_requests(none)} fit, as under none; what the policies add is for the one row of a step."
    if reconstruct == 0:
        return f"Not one request of this context fits while drafting ({_requests(none)} without drafts). Shorten the context."
    if requests is not None and store_all >= requests:
        return (
            f"Do not bother: {_requests(requests)} fit even with store_all, which holds {store_all}. "
            "Memory does not limit you."
        )
    if reconstruct - store_all <= NEGLIGIBLE * store_all:
        share = memory.snapshots / memory.totals()["store_all"]
        return (
            f"Do not bother: store_all holds {store_all} and reconstruct {reconstruct}. At this context the snapshots are "
            f"{share:.1%} of a sequence."
        )
    return " ".join([_gain(memory, fits), *_wanted(fits, requests)])


def _gain(memory: PerSequence, fits: dict[str, int]) -> str:
    none, store_all, reconstruct, ring = (fits[policy] for policy in ("none", "store_all", "reconstruct", "ring"))
    ratio = f", {reconstruct / store_all:.2f} times as many" if store_all else ""
    records = humanise(memory.stash - memory.conv_inputs)
    return (
        f"Use reconstruct: {_requests(reconstruct)} fit, against {store_all} with store_all{ratio}; its records are "
        f"{records} in place of {humanise(memory.snapshots)} of snapshots. Drafting then costs "
        f"{none - reconstruct} of the {none} that fit without drafts, and {ring} fit with ring."
    )


def _wanted(fits: dict[str, int], requests: int | None) -> list[str]:
    if requests is None or requests <= fits["reconstruct"]:
        return []
    if requests <= fits["none"]:
        return [f"The {requests} you want fit only without drafts."]
    return [f"The {requests} you want fit under no policy: shorten the context or add GPUs."]


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def humanise(size: int) -> str:
    """Return bytes for people: KiB, MiB or GiB, whichever reads best."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / (1 << 10):.1f} KiB"
