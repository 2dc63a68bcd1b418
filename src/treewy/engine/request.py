"""What a caller asks for, and what it gets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treewy.draft import Shape
from treewy.engine.stream import Detokenizer, TokenKind
from treewy.errors import RequestError, TreeWYError, UnsupportedError
from treewy.tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        max_new_tokens: Most tokens to generate.
        temperature: 0 for greedy decoding, the only kind so far.
        stop: Strings at which the text ends; the string itself is not part of the text.
        ignore_eos: Go on past the end-of-text token.
        shape: Draft shape or budget of this request; None for the engine's.
        record_gaps: Keep the target's top-2 logit gap at every token, to judge near-ties by.

    Raises:
        RequestError: a value is out of range.
        UnsupportedError: a temperature above 0.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    shape: Shape | None = None
    record_gaps: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens must be an integer of at least 1; got {self.max_new_tokens!r}. Ask for a token."
            )
        if not self.temperature >= 0:
            raise RequestError(f"temperature must be at least 0; got {self.temperature}. Use 0 for greedy decoding.")
        if self.temperature > 0:
            raise UnsupportedError(
                f"Only greedy decoding is supported so far; got temperature {self.temperature}. Use temperature 0."
            )
        if isinstance(self.stop, str) or any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(
                f"stop must be a list of non-empty strings; got {self.stop!r}. Wrap a single string in a list."
            )


@dataclass
class Stats:
    """What a request's steps measured."""

    num_verify_steps: int = 0
    accept_hist: dict[int, int] = field(default_factory=dict)
    tried_at_depth: dict[int, int] = field(default_factory=dict)
    accepted_at_depth: dict[int, int] = field(default_factory=dict)
    num_accepted: int = 0
    num_not_first_sibling: int = 0
    num_drafted: int = 0
    kinds: list[TokenKind] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    state_bytes: int = 0
    conv_bytes: int = 0
    kv_bytes: int = 0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def count_step(self, tree: DraftTree, path: Sequence[int], num_delivered: int, *, was_cut: bool) -> None:
        """Count one verify step: its delivered tokens, and the accepted nodes of its path.

        A step that was cut says nothing of the depths below the cut, so they do not count as tried.
        """
        self.num_verify_steps += 1
        self.num_drafted += tree.num_drafts
        self.accept_hist[num_delivered] = self.accept_hist.get(num_delivered, 0) + 1
        for depth in range(1, (len(path) - 1 if was_cut else tree.max_depth) + 1):
            self.tried_at_depth[depth] = self.tried_at_depth.get(depth, 0) + 1
        for depth, row in enumerate(path[1:], start=1):
            self.accepted_at_depth[depth] = self.accepted_at_depth.get(depth, 0) + 1
            self.num_accepted += 1
            self.num_not_first_sibling += row != tree.children(tree.parents[row])[0]


@dataclass
class Request:
    """One request in flight."""

    id: int
    prompt: list[int]
    params: SamplingParams
    shape: Shape
    max_new_tokens: int  # params' own, or less where the context ends
    detokenizer: Detokenizer
    slot: int | None = None
    prefilled: int = 0
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def num_left(self) -> int:
        """Tokens it may still generate."""
        return self.max_new_tokens - len(self.output)


@dataclass(frozen=True)
class Generation:
    """A finished request.

    Attributes:
        text: Generated text, or "" without a tokenizer.
        token_ids: Generated tokens, the end-of-text token included if it was generated.
        finish_reason: "eos", "stop" or "length"; "error" if the target's logits were not finite, after the tokens so far.
        num_verify_steps: Decoding forwards of the target, prefill apart.
        num_drafted: Draft tokens verified.
        accept_hist: Steps by the number of tokens they delivered.
        accept_rate_by_depth: Share of steps with a node at that depth that accepted one there.
        not_first_sibling_share: Share of accepted nodes that are not their parent's first child.
        kinds: Kind of each token.
        top2_gaps: Target's top-2 logit gap at each token, if asked for.
        tokens_per_s: Tokens after the first, over the time since the first.
        state_bytes, conv_bytes, kv_bytes: Peak per sequence: committed memory and what steps kept until commit.
    """

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    num_verify_steps: int
    num_drafted: int
    accept_hist: dict[int, int]
    accept_rate_by_depth: dict[int, float]
    not_first_sibling_share: float
    kinds: list[TokenKind]
    top2_gaps: list[float]
    tokens_per_s: float
    time_to_first_token_s: float
    state_bytes: int
    conv_bytes: int
    kv_bytes: int

    @property
    def mean_accept_len(self) -> float:
        """(new tokens - 1 from prefill) / verify steps: accepted drafts and the bonus or recovered token."""
        return (len(self.token_ids) - 1) / self.num_verify_steps if self.num_verify_steps else 0.0


def finished(request: Request) -> Generation:
    """Return the result of a request that has finished."""
    s = request.stats
    decode_s = s.last_token - s.first_token
    rates = {depth: s.accepted_at_depth.get(depth, 0) / tried for depth, tried in sorted(s.tried_at_depth.items())}
    return Generation(
        prompt_ids=request.prompt,
        text=request.detokenizer.text,
        token_ids=request.output,
        finish_reason=request.finish_reason or "length",
        num_verify_steps=s.num_verify_steps,
        num_drafted=s.num_drafted,
        accept_hist=dict(sorted(s.accept_hist.items())),
        accept_rate_by_depth=rates,
        not_first_sibling_share=s.num_not_first_sibling / s.num_accepted if s.num_accepted else 0.0,
        kinds=s.kinds,
        top2_gaps=s.gaps,
        tokens_per_s=(len(request.output) - 1) / decode_s if decode_s > 0 else 0.0,
        time_to_first_token_s=s.first_token - s.started,
        state_bytes=s.state_bytes,
        conv_bytes=s.conv_bytes,
        kv_bytes=s.kv_bytes,
    )


def check_finite(generation: Generation) -> None:
    """Raise if a generation ended because the target's logits were not finite.

    Raises:
        TreeWYError: says after how many tokens.
    """
    if generation.finish_reason == "error":
        raise TreeWYError(
            f"The target's logits must be finite; they were not after {len(generation.token_ids)} new tokens. "
            "Check the checkpoint, or use float32."
        )
