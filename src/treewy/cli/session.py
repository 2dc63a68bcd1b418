"""One run of `treewy generate`: a model in memory, engines over it, and what a person or a script sees."""

import secrets
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from treewy.cache import POLICIES
from treewy.cli.generate import Generate, summary
from treewy.cli.loading import load_checkpoint, open_draft_model
from treewy.cli.terminal import progress_bar, status
from treewy.draft import Shape, parse_shape
from treewy.engine import Engine, Generation, SamplingParams, TokenKind
from treewy.engine.lossless import first_difference
from treewy.engine.request import check_finite
from treewy.engine.stream import Tokenizer
from treewy.hf.load import build_engine, eos_ids
from treewy.hf.stock import stock_generate

STYLES = {
    TokenKind.PREFILL: "default",
    TokenKind.PLAIN: "default",
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "yellow",
    TokenKind.BONUS: "cyan",
}
WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)


@dataclass
class Session:
    """A loaded checkpoint and one request to run on it."""

    options: Generate
    folder: Path
    model: PreTrainedModel
    draft_model: PreTrainedModel | None
    tokenizer: Tokenizer
    shape: Shape
    params: SamplingParams
    prompt: list[int]

    @classmethod
    def open(cls, options: Generate) -> "Session":
        """Check everything that can be checked without weights, then load them."""
        shape = parse_shape(tree=options.tree, chain=options.chain)
        params = SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=secrets.randbits(32) if options.seed is None else options.seed,
            drafts=options.drafts,
            record_gaps=options.compare,
        )
        text = options.text()
        folder, model, tokenizer = load_checkpoint(options.model, options.dtype, options.device)
        draft_model = open_draft_model(options.draft_model, model, tokenizer)
        return cls(options, folder, model, draft_model, tokenizer, shape, params, list(tokenizer.encode(text)))

    @cached_property
    def engine(self) -> Engine:
        """The engine the options ask for."""
        return self._engine(self.options.draft, self.options.commit)

    def run(self) -> Generation:
        """Decode with a progress bar on stderr."""
        self._warm_up(self.engine)
        with progress_bar() as progress:
            task = progress.add_task("decoding", total=self.params.max_new_tokens)
            events = self.engine.stream([self.prompt], self.params)
            while True:
                try:
                    progress.advance(task, len(next(events).token_ids))
                except StopIteration as stop:
                    return _finite(stop.value[0])

    def stream(self) -> Generation:
        """Decode to stdout as tokens come, coloured by where they came from on a terminal."""
        self._warm_up(self.engine)
        console = Console()

        def show(text: str, style: str) -> None:
            # Rich is for terminals: elsewhere the text goes out as it is, tabs and all.
            if console.is_terminal:
                console.out(text, style=style, highlight=False, end="")
            else:
                sys.stdout.write(text)
                sys.stdout.flush()

        show(self.tokenizer.decode(self.prompt), "dim")
        events = self.engine.stream([self.prompt], self.params)
        while True:
            try:
                event = next(events)
            except StopIteration as stop:
                show("\n", "")
                return _finite(stop.value[0])
            for piece, kind in zip(event.pieces, event.kinds, strict=True):
                show(piece, STYLES[kind])

    def compare(self, generation: Generation) -> dict[str, Any]:
        """Decode again without drafts, under the other policies and with stock transformers; return all side by side."""
        with status("decoding without drafts"):
            none = self._variant("none", "reconstruct")
        by_policy = {self.options.commit: generation}
        for policy in POLICIES:
            if policy not in by_policy:
                with status(f"decoding with {policy}"):
                    by_policy[policy] = self._variant(self.options.draft, policy)
        with status("decoding with stock transformers"):
            stock = stock_generate(self.model, self.prompt, self.params.max_new_tokens, eos_ids(self.model))
        difference = _difference(none, generation.token_ids)
        return {
            "none": summary(none),
            **{name: summary(g) | {"first_diff": _difference(none, g.token_ids)} for name, g in by_policy.items()},
            "transformers": {
                "token_ids": stock.token_ids,
                "tokens_per_s": stock.tokens_per_s,
                "first_diff": _difference(none, stock.token_ids),
            },
            "equal": difference is None,
            "first_diff": difference,
        }

    def print_report(self, generation: Generation, comparison: dict[str, Any] | None) -> None:
        """Print the figures below the text: a line on stderr, or the comparison as a table on stdout."""
        stderr = Console(stderr=True, highlight=False)
        if stderr.is_terminal and self.options.draft != "none":
            stderr.print(
                "[green]accepted drafts[/] · [yellow]recovered: no draft fitted[/] · [cyan]bonus: all drafts fitted[/]"
            )
        stderr.print(
            f"{len(generation.token_ids)} tokens in {generation.num_verify_steps} steps, "
            f"{generation.mean_accept_len:.2f} a step, {generation.tokens_per_s:.1f} tokens/s, "
            f"state {generation.state_bytes / 2**20:.2f} MiB"
        )
        if comparison is not None:
            Console(highlight=False).print(_table(self.options, self.model.dtype, comparison))

    def _variant(self, draft: str, commit: str) -> Generation:
        engine = self._engine(draft, commit)
        self._warm_up(engine)
        return engine.generate([self.prompt], replace(self.params, record_gaps=True))[0]

    def _warm_up(self, engine: Engine) -> None:
        """Decode a few tokens untimed: the first step of a process pays for what later ones do not."""
        with status("warming up"):
            engine.generate([self.prompt], WARM_UP)

    def _engine(self, draft: str, commit: str) -> Engine:
        return build_engine(
            self.model,
            draft=draft,
            folder=self.folder,
            draft_model=self.draft_model if draft == "model" else None,
            shape=self.shape,
            commit=commit,
            tokenizer=self.tokenizer,
            max_num_seqs=1,
        )


def _finite(generation: Generation) -> Generation:
    check_finite(generation)
    return generation


def _difference(none: Generation, token_ids: list[int]) -> dict[str, Any] | None:
    index = first_difference(none.token_ids, token_ids)
    if index is None:
        return None
    return {"index": index, "gap": none.top2_gaps[index] if index < len(none.top2_gaps) else None}


def _table(options: Generate, dtype: torch.dtype, comparison: dict[str, Any]) -> Table:
    drafted = [name for name in comparison if name in POLICIES]
    labels = {name: f"{options.draft}, {name}" for name in drafted}
    labels |= {"none": "no drafts", "transformers": "transformers"}
    table = Table(box=box.SIMPLE, title=_title(dtype, comparison), title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("tokens", "steps", "tok/step", "tok/s", "MiB", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in (*drafted, "none", "transformers"):
        figures = comparison[name]
        table.add_row(
            labels[name],
            str(len(figures["token_ids"])),
            str(figures.get("num_verify_steps", "")),
            f"{figures['mean_accept_len']:.2f}" if "mean_accept_len" in figures else "",
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['state_bytes'] / 2**20:.2f}" if "state_bytes" in figures else "",
            "yes" if figures.get("first_diff") is None else "no",
        )
    return table


def _title(dtype: torch.dtype, comparison: dict[str, Any]) -> str:
    """Return what the table shows in words, every difference with its place and gap."""
    differences = {name: figures["first_diff"] for name, figures in comparison.items() if _differs(figures)}
    if not differences:
        return "same tokens"
    places = [
        f"{name} at token {x['index']}" + ("" if x["gap"] is None else f", gap {x['gap']:.1e}")
        for name, x in differences.items()
    ]
    why = "see docs/lossless.md" if dtype == torch.float32 else "expected in bfloat16"
    return f"tokens differ from those without drafts ({why}): {'; '.join(places)}"


def _differs(figures: Any) -> bool:
    return isinstance(figures, dict) and figures.get("first_diff") is not None
