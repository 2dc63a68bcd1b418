"""What a caller asks for, and what it gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from treewy.draft import Budget, Draws, Shape
from treewy.engine.stream import Detokenizer, TokenKind, TokenLogprobs
from treewy.errors import RequestError, TreeWYError, UnsupportedError
from treewy.sampling import ACCEPT, DRAFT, Law, Stream
from treewy.tree import DraftTree

# Wishes that other engines know and this one does not: name and the value that wishes nothing.
_UNSUPPORTED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": None,
    "grammar": None,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        max_new_tokens: Most tokens to generate.
        temperature: 0 for greedy decoding; above it, tokens are sampled.
        top_k, top_p, min_p: Which tokens can be sampled (see `sampling.Law`); without effect at temperature 0.
        seed: Of what is random: the same seed gives the same tokens, alone and in any batch. None takes a fresh one.
        drafts: At a temperature, whether a drafter that can draw draws its drafts from the same kind of law ("sampled"), or
            proposes what it finds most likely ("argmax"). The law of the text is the same. With "argmax" so are, up to
            rounding, the tokens of a seed with and without drafts.
        logprobs: Record the log-probability of each token, and of this many most likely ones; None records nothing. They
            are the model's own, before temperature and truncation.
        stop: Strings at which the text ends; the string itself is not part of the text.
        ignore_eos: Go on past the end-of-text token.
        shape: Draft shape or budget of this request; None for the engine's.
        record_gaps: Keep the target's top-2 logit gap at every token, to judge near-ties by.
        repetition_penalty, presence_penalty, frequency_penalty, min_tokens, logit_bias, bad_words, grammar: Not supported;
            named here so that a wish is refused, not lost.

    Raises:
        RequestError: a value is out of range.
        UnsupportedError: a penalty or constraint is asked for.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    drafts: str = "sampled"
    logprobs: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    shape: Shape | None = None
    record_gaps: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Any = None
    bad_words: Any = None
    grammar: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens must be an integer of at least 1; got {self.max_new_tokens!r}. Ask for a token."
            )
        if self.shape is not None and not isinstance(self.shape, (DraftTree, Budget)):
            raise RequestError(
                f"shape must be a DraftTree or a Budget; got {self.shape!r:.80}. Use DraftTree.from_widths([3, 3, 3])."
            )
        for name in ("temperature", "top_p", "min_p"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)):
                raise RequestError(f"{name} must be a number; got {given!r:.80}. Leave it out for the default.")
        if not self.temperature >= 0:
            raise RequestError(f"temperature must be at least 0; got {self.temperature}. Use 0 for greedy decoding.")
        # At temperature 0 they have no effect, but nonsense is nonsense all the same.
        _law(self, self.temperature or 1.0)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise RequestError(
                f"seed must be an integer of at least 0; got {self.seed!r}. Leave it out for a fresh one."
            )
        if self.drafts not in ("sampled", "argmax"):
            raise RequestError(f"drafts must be 'sampled' or 'argmax'; got {self.drafts!r}. Choose one of them.")
        if self.logprobs is not None and (
            isinstance(self.logprobs, bool) or not isinstance(self.logprobs, int) or self.logprobs < 0
        ):
            raise RequestError(
                f"logprobs must be an integer of at least 0; got {self.logprobs!r}. Use 0 for the chosen tokens alone."
            )
        for name, nothing in _UNSUPPORTED.items():
            if getattr(self, name) != nothing:
                raise UnsupportedError(
                    f"Penalties and constraints are not supported; got {name}={getattr(self, name)!r:.80}. "
                    f"Leave {name} at {nothing!r}."
                )
        if (
            isinstance(self.stop, str)
            or not isinstance(self.stop, Iterable)
            or any(not isinstance(text, str) or not text for text in self.stop)
        ):
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
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

    @cached_property
    def law(self) -> Law | None:
        """The law its tokens follow; None for greedy decoding."""
        return _law(self.params, self.params.temperature) if self.params.temperature > 0 else None

    @cached_property
    def coin(self) -> Stream:
        """What its tokens are chosen with."""
        return Stream(self.params.seed, ACCEPT)

    @cached_property
    def draws(self) -> Draws | None:
        """How its drafts are drawn; None where they are chosen."""
        if self.law is None or self.params.drafts == "argmax":
            return None
        return Draws(self.law, Stream(self.params.seed, DRAFT))


def _law(params: SamplingParams, temperature: float) -> Law:
    return Law(temperature=temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


@dataclass(frozen=True)
class Generation:
    """A finished request.

    Attributes:
        text: Generated text, or "" without a tokenizer.
        token_ids: Generated tokens, the end-of-text token included if it was generated.
        finish_reason: "eos", "stop" or "length"; "abort" if it was aborted, or if a step died while it ran; "error" if the
            target's logits were not finite, after the tokens so far.
        num_verify_steps: Decoding forwards of the target, prefill apart.
        num_drafted: Draft tokens verified.
        accept_hist: Steps by the number of tokens they delivered.
        accept_rate_by_depth: Share of steps with a node at that depth that accepted one there.
        not_first_sibling_share: Share of accepted nodes that are not their parent's first child.
        kinds: Kind of each token.
        top2_gaps: Target's top-2 logit gap at each token, if asked for.
        logprobs: Log-probabilities at each token, if asked for.
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
    logprobs: list[TokenLogprobs]
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
        logprobs=s.logprobs,
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
