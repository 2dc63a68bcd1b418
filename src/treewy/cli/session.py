"""One run of `treewy generate`: a model in memory, engines over it, and what a person or a script sees."""

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treewy.cli.generate import Generate, summary
from treewy.draft import parse_shape
from treewy.engine import Engine, Generation, SamplingParams, TokenKind
from treewy.engine.lossless import first_difference
from treewy.engine.request import check_finite
from treewy.engine.stream import Tokenizer
from treewy.errors import RequestError
from treewy.hf.checkpoint import load_model, load_tokenizer, resolve
from treewy.hf.load import build_engine, eos_ids, resolve_dtype
from treewy.hf.stock import stock_generate
from treewy.tree import DraftTree

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
    tokenizer: Tokenizer
    shape: DraftTree
    params: SamplingParams
    prompt: list[int]

    @classmethod
    def open(cls, options: Generate) -> "Session":
        """Check everything that can be checked without weights, then load them."""
        shape = parse_shape(tree=options.tree, chain=options.chain)
        params = SamplingParams(max_new_tokens=options.max_new_tokens, record_gaps=options.compare)
        text, device = options.text(), resolve_device(options.device)
        dtype = resolve_dtype(None if options.dtype == "auto" else options.dtype, device)
        _quieten_transformers()
        folder = resolve(options.model)
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, dtype, device)
        return cls(options, folder, model, tokenizer, shape, params, list(tokenizer.encode(text)))

    @cached_property
    def engine(self) -> Engine:
        """The engine the options ask for."""
        return self._engine(self.options.draft, self.options.commit)

    def run(self) -> Generation:
        """Decode with a progress bar on stderr."""
        self.engine.generate([self.prompt], WARM_UP)
        with _progress() as progress:
            task = progress.add_task("decoding", total=self.params.max_new_tokens)
            events = self.engine.stream([self.prompt], self.params)
            while True:
                try:
                    progress.advance(task, len(next(events).token_ids))
                except StopIteration as stop:
                    return _finite(stop.value[0])

    def stream(self) -> Generation:
        """Decode to stdout as tokens come, coloured by where they came from on a terminal."""
        self.engine.generate([self.prompt], WARM_UP)
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
        """Decode again without drafts, with store_all and with stock transformers; return the figures side by side."""
        none = self._variant("none", "reconstruct")
        store_all = self._variant(self.options.draft, "store_all")
        stock = stock_generate(self.model, self.prompt, self.params.max_new_tokens, eos_ids(self.model))
        difference = _difference(none, generation.token_ids)
        return {
            "none": summary(none),
            "store_all": summary(store_all) | {"first_diff": _difference(none, store_all.token_ids)},
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
            stderr.print("[green]accepted[/] [yellow]recovered[/] [cyan]bonus[/]")
        stderr.print(
            f"{len(generation.token_ids)} tokens in {generation.num_verify_steps} steps, "
            f"{generation.mean_accept_len:.2f} a step, {generation.tokens_per_s:.1f} tokens/s, "
            f"state {generation.state_bytes / 2**20:.2f} MiB"
        )
        if comparison is not None:
            Console(highlight=False).print(_table(self.options, summary(generation), comparison))

    def _variant(self, draft: str, commit: str) -> Generation:
        engine = self._engine(draft, commit)
        engine.generate([self.prompt], WARM_UP)
        return engine.generate([self.prompt], replace(self.params, record_gaps=True))[0]

    def _engine(self, draft: str, commit: str) -> Engine:
        return build_engine(
            self.model,
            draft=draft,
            folder=self.folder,
            shape=self.shape,
            commit=commit,
            tokenizer=self.tokenizer,
            max_num_seqs=1,
        )


def _finite(generation: Generation) -> Generation:
    check_finite(generation)
    return generation


def resolve_device(name: str) -> torch.device:
    """Return the device meant by `--device`.

    Raises:
        RequestError: the name is unknown, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RequestError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}. Choose one of them.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"A CUDA device must be there to be used; got {name!r} and {torch.cuda.device_count()} devices. Use cpu."
        )
    return device


def _difference(none: Generation, token_ids: list[int]) -> dict[str, Any] | None:
    index = first_difference(none.token_ids, token_ids)
    if index is None:
        return None
    return {"index": index, "gap": none.top2_gaps[index] if index < len(none.top2_gaps) else None}


def _place(difference: dict[str, Any]) -> str:
    gap = difference["gap"]
    return f"no, at {difference['index']} " + ("(longer)" if gap is None else f"(gap {gap:.1e})")


def _table(options: Generate, chosen: dict[str, Any], comparison: dict[str, Any]) -> Table:
    table = Table(title="same tokens, fewer steps" if comparison["equal"] else "tokens differ: see docs/lossless.md")
    for column in ("", "tokens", "steps", "tokens/step", "tokens/s", "state MiB", "equal"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        (f"{options.draft}, {options.commit}", chosen, comparison["first_diff"]),
        (f"{options.draft}, store_all", comparison["store_all"], comparison["store_all"]["first_diff"]),
        ("no drafts", comparison["none"], None),
        ("stock transformers", comparison["transformers"], comparison["transformers"]["first_diff"]),
    ]
    for name, figures, difference in rows:
        table.add_row(
            name,
            str(len(figures["token_ids"])),
            str(figures.get("num_verify_steps", "")),
            f"{figures['mean_accept_len']:.2f}" if "mean_accept_len" in figures else "",
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['state_bytes'] / 2**20:.2f}" if "state_bytes" in figures else "",
            "yes" if difference is None else _place(difference),
        )
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _quieten_transformers() -> None:
    """Keep transformers' notes off stderr; its bar stays where somebody looks."""
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
