"""`treewy bench engine`: decoding speed of drafted variants beside no drafts and stock transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from treewy.bench.timing import Spread, interleave, ratio
from treewy.draft import Shape, parse_shape
from treewy.engine import Engine, Generation, SamplingParams
from treewy.engine.lossless import first_difference
from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError
from treewy.hf.load import build_engine, eos_ids
from treewy.hf.stock import stock_generate

NONE, STOCK = "no drafts", "transformers"


class Setting(NamedTuple):
    """What is benchmarked.

    Attributes:
        prompts: Token ids; decoded one batch of `batch_size` after the other.
        params: Of every request.
        batch_size: Requests decoded at once.
        num_rounds: Times each variant decodes all prompts.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    batch_size: int
    num_rounds: int


class Run(NamedTuple):
    """One variant's pass over the prompts."""

    tokens_per_s: float
    generations: list[Generation]
    token_ids: list[list[int]]


@dataclass(frozen=True)
class Figures:
    """What a variant's rounds say.

    Attributes:
        tokens_per_s: Tokens delivered once every request of a batch has its first, over the time they took.
        over_none, over_transformers: Ratios to those variants, round by round; None where they were not run.
        equal: Whether the tokens are those without drafts, in every round; None where sampling leaves that open.
        first_diff: The first prompt and token that differ.
    """

    tokens_per_s: Spread
    over_none: Spread | None
    over_transformers: Spread | None
    mean_accept_len: float | None
    state_bytes: int | None
    equal: bool | None
    first_diff: dict[str, int] | None


def engine_variants(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    draft: str,
    draft_model: PreTrainedModel | None,
    shapes: Sequence[str],
    commits: Sequence[str],
    max_num_seqs: int,
) -> dict[str, Engine]:
    """Return the engine without drafts, and one per shape and commit policy, by name.

    Args:
        shapes: As `chain:3`, `tree:3,3,3` or `best:16`.
        draft_model: For draft "model".
    """

    def build(kind: str, commit: str, shape: Shape | None = None) -> Engine:
        return build_engine(
            model,
            draft=kind,
            folder=folder,
            draft_model=draft_model if kind == "model" else None,
            shape=shape,
            commit=commit,
            tokenizer=tokenizer,
            max_num_seqs=max_num_seqs,
        )

    drafted = {f"{shape}, {commit}": build(draft, commit, read_shape(shape)) for shape in shapes for commit in commits}
    return {NONE: build("none", commits[0])} | drafted


def read_shape(text: str) -> Shape:
    """Return the shape of `chain:3`, `tree:3,3,3` or `best:16`.

    Raises:
        RequestError: the text is none of them.
    """
    kind, _, size = text.partition(":")
    if kind == "chain" and size.isdecimal():
        return parse_shape(chain=int(size))
    if kind == "tree":
        return parse_shape(tree=size)
    if kind == "best":
        return parse_shape(tree=text)
    raise RequestError(f"A shape must be as in chain:3, tree:3,3,3 or best:16; got {text!r}. Choose one of them.")


def measure(
    engines: dict[str, Engine], model: PreTrainedModel | None, setting: Setting, advance: Callable[[], None]
) -> dict[str, Figures]:
    """Run all variants in interleaved rounds.

    Args:
        engines: By name; `NONE` among them is what the others are held against.
        model: Also run stock transformers on it, greedily, one prompt at a time; None leaves that out.
        setting: What to decode.
        advance: Called after each of (variants * rounds) passes.
    """
    variants: dict[str, Callable[[], Run]] = {
        name: (lambda engine=engine: _run_engine(engine, setting)) for name, engine in engines.items()
    }
    if model is not None:
        variants[STOCK] = lambda: _run_stock(model, setting)
    for warm_up in variants.values():
        warm_up()
    runs = interleave(variants, setting.num_rounds, advance)
    return {name: _figures(name, runs, setting) for name in runs}


def as_json(figures: Figures) -> dict[str, Any]:
    """Return the figures JSON-ready."""
    spreads = {name: getattr(figures, name) for name in ("tokens_per_s", "over_none", "over_transformers")}
    return {name: None if spread is None else spread._asdict() for name, spread in spreads.items()} | {
        name: getattr(figures, name) for name in ("mean_accept_len", "state_bytes", "equal", "first_diff")
    }


def _run_engine(engine: Engine, setting: Setting) -> Run:
    seconds, tokens, generations = 0.0, 0, []
    for start in range(0, len(setting.prompts), setting.batch_size):
        with engine.open() as session:
            numbers = session.add_all(setting.prompts[start : start + setting.batch_size], setting.params)
            begun: set[int] = set()
            while len(begun) < len(numbers) and not session.is_idle:
                begun |= {event.index for event in session.step()}
            clock = perf_counter()
            while not session.is_idle:
                tokens += sum(len(event.token_ids) for event in session.step())
            seconds += perf_counter() - clock
            generations += [session.result(number) for number in numbers]
    return Run(tokens / seconds if seconds else 0.0, generations, [g.token_ids for g in generations])


def _run_stock(model: PreTrainedModel, setting: Setting) -> Run:
    eos = [] if setting.params.ignore_eos else eos_ids(model)
    runs = [stock_generate(model, prompt, setting.params.max_new_tokens, eos) for prompt in setting.prompts]
    tokens = [len(run.token_ids) - 1 for run in runs]
    seconds = sum(n / run.tokens_per_s for n, run in zip(tokens, runs, strict=True) if run.tokens_per_s)
    return Run(sum(tokens) / seconds if seconds else 0.0, [], [run.token_ids for run in runs])


def _figures(name: str, runs: dict[str, list[Run]], setting: Setting) -> Figures:
    speeds = {variant: Spread.of(run.tokens_per_s for run in rounds) for variant, rounds in runs.items()}
    generations = [g for run in runs[name] for g in run.generations]
    steps = sum(g.num_verify_steps for g in generations)
    difference = _difference(runs[NONE], runs[name])
    greedy = setting.params.temperature == 0
    return Figures(
        tokens_per_s=speeds[name],
        over_none=None if name == NONE else ratio(speeds[name], speeds[NONE]),
        over_transformers=ratio(speeds[name], speeds[STOCK]) if STOCK in speeds and name != STOCK else None,
        mean_accept_len=sum(len(g.token_ids) - 1 for g in generations) / steps if steps else None,
        state_bytes=max((g.state_bytes for g in generations), default=None),
        equal=difference is None if greedy else None,
        first_diff=difference if greedy else None,
    )


def _difference(none: list[Run], drafted: list[Run]) -> dict[str, int] | None:
    """Return the first place where any round's tokens are not those without drafts."""
    for a, b in zip(none, drafted, strict=True):
        for place, (expected, got) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            index = first_difference(expected, got)
            if index is not None:
                return {"prompt": place, "token": index}
    return None
