"""`treewy bench engine`: how fast it decodes here, measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from treewy.errors import RequestError, TreeWYError

if TYPE_CHECKING:
    from treewy.bench.engine import Figures
    from treewy.bench.timing import Spread
    from treewy.engine import SamplingParams

PROMPTS = Path(__file__).parent.parent / "assets" / "bench_prompts.txt"


@dataclass(frozen=True)
class BenchEngine:
    """Measure decoding speed: drafted, without drafts and stock transformers, in interleaved rounds."""

    model: Annotated[str | None, arg(metavar="DIR_OR_HUB_ID")] = None
    """Checkpoint folder or hub id. Left out: the small trained checkpoint that ships with treewy."""
    draft: Literal["mtp", "ngram", "model"] = "mtp"
    """Who drafts. mtp: the checkpoint's own head; ngram: the text so far; model: the one --draft-model names."""
    draft_model: Annotated[str | None, arg(metavar="DIR_OR_HUB_ID")] = None
    """Checkpoint that drafts, for --draft model."""
    shapes: Annotated[tuple[str, ...], arg(metavar="SHAPE")] = ("chain:3", "tree:3,3,3")
    """Draft shapes, as in chain:3, tree:3,3,3 or best:16."""
    commits: tuple[Literal["store_all", "reconstruct", "ring"], ...] = ("reconstruct",)
    """Commit policies, each with every shape."""
    prompts: Annotated[Path | None, arg(metavar="FILE")] = None
    r"""One prompt per line, \n for a line break. Left out: two of prose and two of code."""
    batch_size: int = 1
    """Requests decoded at once. Stock transformers runs beside batches of 1 only."""
    max_new_tokens: int = 100
    """Tokens per prompt, end-of-text or not; at least 8, as a first step may deliver several before the clock starts."""
    temperature: float = 0.0
    """0 decodes greedily. Stock transformers is run at 0 only."""
    seed: int = 0
    """Of sampling."""
    rounds: int = 5
    """Times every variant decodes all prompts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda or cuda:N. auto: the GPU if there is one."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        """Run the command; raises TreeWYError after the report if a variant's tokens are wrong."""
        import torch

        from treewy.bench.engine import Setting, as_json, engine_variants, measure
        from treewy.bench.environment import environment
        from treewy.cli.loading import load_checkpoint, open_draft_model
        from treewy.cli.terminal import progress_bar

        self._refuse_nonsense()
        texts, params = self._texts(), self._params()
        folder, model, tokenizer = load_checkpoint(self.model, self.dtype, self.device)
        draft_model = open_draft_model(self.draft_model, model, tokenizer)
        options = {"draft": self.draft, "draft_model": draft_model, "shapes": self.shapes, "commits": self.commits}
        engines = engine_variants(model, folder, tokenizer, max_num_seqs=self.batch_size, **options)
        stock = model if self.batch_size == 1 and self.temperature == 0 else None
        setting = Setting([list(tokenizer.encode(text)) for text in texts], params, self.batch_size, self.rounds)
        with progress_bar() as progress:
            passes = (len(engines) + (stock is not None)) * self.rounds
            task = progress.add_task("decoding", total=passes)
            results = measure(engines, stock, setting, lambda: progress.advance(task))
        report = {
            "benchmark": "engine",
            "setting": self._setting() | {"dtype": str(model.dtype).removeprefix("torch."), "num_prompts": len(texts)},
            "environment": environment(model.device, self.seed),
            "variants": {name: as_json(figures) for name, figures in results.items()},
        }
        if self.json:
            print(json.dumps(report))
        else:
            _print(results, report)
        wrong = [name for name, figures in results.items() if figures.equal is False]
        if wrong and model.dtype == torch.float32:
            raise TreeWYError(
                f"Every variant must decode the tokens of decoding without drafts; {', '.join(wrong)} did not. "
                "Its speed says nothing; see docs/lossless.md."
            )

    def _params(self) -> "SamplingParams":
        from treewy.engine import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=True
        )

    def _texts(self) -> list[str]:
        file = self.prompts or PROMPTS
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise RequestError(
                f"A prompt file must be readable text in UTF-8; {file} is not: {error}. Check the path."
            ) from error
        texts = [line.replace("\\n", "\n") for line in lines if line.strip()]
        if not texts:
            raise RequestError(f"A prompt file must hold at least one prompt; {file} holds none. Write one per line.")
        return texts

    def _refuse_nonsense(self) -> None:
        """Refuse before anything is loaded what cannot be run."""
        from treewy.bench.engine import read_shape

        least = {
            "batch-size": (self.batch_size, 1),
            "rounds": (self.rounds, 1),
            "max-new-tokens": (self.max_new_tokens, 8),
        }
        for name, (given, minimum) in least.items():
            if given < minimum:
                raise RequestError(f"{name} must be at least {minimum}; got {given}. Leave it out for the default.")
        if not self.commits or not self.shapes:
            raise RequestError(
                "commits and shapes must name at least one each; got none. Leave them out for the default."
            )
        if (self.draft == "model") != (self.draft_model is not None):
            raise RequestError(
                f"--draft model and --draft-model go together; got draft {self.draft} with draft model {self.draft_model}. "
                "Give both or neither."
            )
        for shape in self.shapes:
            read_shape(shape)

    def _setting(self) -> dict[str, Any]:
        names = ("draft", "batch_size", "max_new_tokens", "temperature", "seed", "rounds")
        return {name: getattr(self, name) for name in names}


def _print(results: "dict[str, Figures]", report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    setting, environment = report["setting"], report["environment"]
    title = (
        f"{setting['num_prompts']} prompts, {setting['max_new_tokens']} tokens each, {setting['batch_size']} at a time, "
        f"{setting['dtype']}, {environment['device']}; medians of {setting['rounds']} rounds"
    )
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("tok/s (range)", "x none", "x stock", "tok/step", "MiB", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, x in results.items():
        table.add_row(
            name,
            f"{x.tokens_per_s.median:.0f} ({x.tokens_per_s.low:.0f}-{x.tokens_per_s.high:.0f})",
            _times(x.over_none, x.equal),
            _times(x.over_transformers, x.equal),
            "" if x.mean_accept_len is None else f"{x.mean_accept_len:.2f}",
            "" if x.state_bytes is None else f"{x.state_bytes / 2**20:.2f}",
            {True: "yes", False: "no", None: ""}[x.equal],
        )
    Console(highlight=False).print(table)


def _times(ratio: "Spread | None", equal: bool | None) -> str:
    """Return a ratio; wrong tokens have none."""
    if ratio is None or equal is False:
        return ""
    return f"{ratio.median:.2f}"
