"""`treewy generate`: decode one prompt, as it comes, and compare policies if asked."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from treewy.errors import RequestError

if TYPE_CHECKING:
    from treewy.engine import Generation

DEMO_PROMPT = "It was a bright morning in May, and the road to the village was"


@dataclass(frozen=True)
class Generate:
    """Decode a prompt with a draft tree per step: same tokens as without (at a temperature: same law), fewer steps."""

    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT")] = None
    """Text to continue, in quotes. Left out: standard input if something is piped (less one final newline), else a short
    demonstration."""
    model: Annotated[str | None, arg(metavar="DIR_OR_HUB_ID")] = None
    """Checkpoint folder or hub id. Left out: the small trained checkpoint that ships with treewy."""
    draft: Literal["mtp", "ngram", "model", "none"] = "mtp"
    """Who drafts. mtp: the checkpoint's own head; ngram: what followed the last words before; model: a smaller model; none:
    nobody, plain decoding."""
    draft_model: Annotated[str | None, arg(metavar="DIR_OR_HUB_ID")] = None
    """Checkpoint of the smaller model, with the same tokens, for draft model."""
    tree: Annotated[str | None, arg(metavar="WIDTHS|best:ROWS")] = None
    """Draft tree: by children per level, as in 3,3,3; or a budget of rows, root included, spent on the likeliest drafts, as
    in best:16, with depth best:16x5, with children per row best:16x5x3."""
    chain: Annotated[int | None, arg(metavar="INT")] = None
    """Draft chain of this many tokens. Left out: 3, unless there is a tree."""
    commit: Literal["store_all", "reconstruct", "ring"] = "reconstruct"
    """store_all keeps a state per draft until one is accepted (the baseline); reconstruct rebuilds the accepted one; ring
    collects accepted rows and writes the state once in many."""
    max_new_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 decodes greedily; above it, tokens are sampled."""
    top_p: float = 1.0
    """Sample from the most likely tokens that reach this probability together. 1 keeps all; no effect at temperature 0."""
    top_k: int = 0
    """Sample from this many most likely tokens. 0 keeps all; no effect at temperature 0."""
    min_p: float = 0.0
    """Sample from tokens at least this times as likely as the most likely one. 0 keeps all; no effect at temperature 0."""
    seed: Annotated[int | None, arg(metavar="INT")] = None
    """Of sampling. Left out: a fresh one, which --json reports."""
    drafts: Literal["sampled", "argmax"] = "sampled"
    """At a temperature. sampled: drafts are drawn, more of them stand; argmax: the text of a seed is that without drafts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda or cuda:N. auto: the GPU if there is one."""
    compare: Annotated[bool, FlagCreatePairsOff] = False
    """Also decode under the other commit policies, without drafts and with stock transformers, and compare."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object instead of text."""

    def run(self) -> None:
        """Run the command."""
        self._refuse_contradictions()
        from treewy.cli.session import Session

        session = Session.open(self)
        generation = session.stream() if not self.json else session.run()
        comparison = session.compare(generation) if self.compare else None
        if self.json:
            extra: dict[str, Any] = {"seed": session.params.seed} if self.temperature > 0 else {}
            extra |= {"compare": comparison} if comparison else {}
            print(json.dumps(summary(generation) | extra))
        else:
            session.print_report(generation, comparison)

    def text(self) -> str:
        """Return the prompt: as given, piped, or the demonstration."""
        try:
            piped = _piped() if self.prompt is None else None
            text = next(given for given in (self.prompt, piped, DEMO_PROMPT) if given is not None)
            text.encode()
        except UnicodeError as error:
            raise RequestError("A prompt must be text in UTF-8; it holds other bytes. Check its encoding.") from error
        if not text:
            raise RequestError("A prompt must hold at least one token; the prompt is empty. Give it some text.")
        return text

    def _refuse_contradictions(self) -> None:
        if self.compare and self.temperature != 0:
            raise RequestError(
                "Only greedy decoding gives one text to compare; got compare with temperature "
                f"{self.temperature}. Drop one of them."
            )
        if self.draft == "none" and (self.tree is not None or self.chain is not None):
            raise RequestError("A draft shape needs a drafter; got draft none with a shape. Drop one of them.")
        if self.draft == "model" and self.draft_model is None:
            raise RequestError("Draft model needs a model to draft with; got none. Give --draft-model.")
        if self.draft != "model" and self.draft_model is not None:
            raise RequestError(
                f"A draft model is for draft model only; got {self.draft_model!r} with draft {self.draft}. Drop one of them."
            )


def _piped() -> str | None:
    """Return what is piped in, without the newline that `echo` adds; None if that is nothing."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    return piped.removesuffix("\n") if piped else None


def summary(generation: "Generation") -> dict[str, Any]:
    """Return the public fields of a generation, JSON-ready."""
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "num_verify_steps": generation.num_verify_steps,
        "num_drafted": generation.num_drafted,
        "mean_accept_len": generation.mean_accept_len,
        "accept_hist": {str(length): count for length, count in generation.accept_hist.items()},
        "accept_rate_by_depth": {str(d): rate for d, rate in generation.accept_rate_by_depth.items()},
        "not_first_sibling_share": generation.not_first_sibling_share,
        "finish_reason": generation.finish_reason,
        "tokens_per_s": generation.tokens_per_s,
        "time_to_first_token_s": generation.time_to_first_token_s,
        "state_bytes": generation.state_bytes,
        "conv_bytes": generation.conv_bytes,
        "kv_bytes": generation.kv_bytes,
    }
