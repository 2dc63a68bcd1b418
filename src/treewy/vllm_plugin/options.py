"""What a user may ask of the plugin: parsed once, from `additional_config["treewy"]` of vLLM's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal, get_args

from treewy.errors import RequestError
from treewy.tree import DraftTree

Commit = Literal["store_all", "reconstruct", "ring"]

# Where the options stand in vLLM's `additional_config`.
SECTION = "treewy"
COMMIT, WIDTHS, CHECK_EVERY, RING_CAPACITY = "mamba_state_commit", "draft_tree_widths", "check_every", "ring_capacity"
KEYS = (COMMIT, WIDTHS, CHECK_EVERY, RING_CAPACITY)
# Rows of a tree, root included, and of a history: the kernels' bound on the one and a sane one on the other.
MAX_ROWS = 128


@dataclass(frozen=True)
class Options:
    """Options of one engine.

    Attributes:
        commit: How Gated DeltaNet layers commit. `store_all` is vLLM as it is: a state per draft.
        widths: Children of every row, level by level; None drafts a chain, as vLLM does.
        check_every: Debugging: every how many commits one is computed again by the recurrence and compared; 0 for none.
        ring_capacity: Accepted rows that a request's history holds under `ring` (C).

    Raises:
        RequestError: a value is out of range, or two do not go together.
    """

    commit: Commit = "store_all"
    widths: tuple[int, ...] | None = None
    check_every: int = 0
    ring_capacity: int = 16

    def __post_init__(self) -> None:
        _check(self.commit, self.widths, self.check_every, self.ring_capacity)

    @property
    def active(self) -> bool:
        """Whether anything but vLLM's own behaviour is asked for."""
        return self.commit != "store_all"

    @property
    def num_tree_drafts(self) -> int | None:
        """Return the drafts of the tree, which vLLM must be told as `num_speculative_tokens`; None for a chain."""
        return None if self.widths is None else num_drafts(self.widths)

    @property
    def longest_step(self) -> int:
        """Return the rows of a full tree, root included; 1 without a tree."""
        return 1 + (self.num_tree_drafts or 0)

    def tree(self, drafts: int) -> DraftTree:
        """Return what a request drafts in one step: a chain of `drafts` tokens, or the tree that was asked for."""
        return DraftTree.chain(drafts) if self.widths is None else DraftTree.from_widths(self.widths)

    def longest_path(self, drafts: int) -> int:
        """Return the most rows that one step can commit, root included, when vLLM drafts `drafts` tokens."""
        return 1 + (drafts if self.widths is None else len(self.widths))

    def kept_rows(self, step_rows: int) -> int:
        """Return how many accepted rows a request may keep outside its state when a step has `step_rows` rows."""
        return self.ring_capacity if self.commit == "ring" else self.longest_path(step_rows - 1)


def num_drafts(widths: tuple[int, ...]) -> int:
    """Return the rows below the root of a tree: a level has as many as the product of the widths down to it."""
    return sum(accumulate(widths, mul))


def options_of(vllm_config: Any) -> Options:
    """Return the options in a whole configuration of vLLM; see `parse`."""
    return parse(vllm_config.additional_config)


def parse(additional_config: Any) -> Options:
    """Return the options in vLLM's `additional_config`; the defaults, which change nothing, where it has none.

    Raises:
        RequestError: a key is unknown, or a value is not of its kind.
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if section is None:
        return Options()
    if not isinstance(section, Mapping):
        raise RequestError(
            f"additional_config[{SECTION!r}] must be a JSON object of options; got {section!r:.80}. Use "
            f'{{"{SECTION}": {{"{COMMIT}": "reconstruct"}}}}.'
        )
    unknown = [key for key in section if key not in KEYS]
    if unknown:
        raise RequestError(
            f"Options of treewy must be among {', '.join(KEYS)}; got {', '.join(map(repr, unknown)):.200}. Mend the name "
            "or leave it out."
        )
    widths = section.get(WIDTHS)
    values = (
        section.get(COMMIT, Options.commit),
        tuple(widths) if isinstance(widths, list | tuple) else widths,
        section.get(CHECK_EVERY, Options.check_every),
        section.get(RING_CAPACITY, Options.ring_capacity),
    )
    # Before they pass for what the annotations say: they are JSON.
    _check(*values)
    return Options(*values)


def _check(commit: Any, widths: Any, check_every: Any, ring_capacity: Any) -> None:
    if commit not in get_args(Commit):
        raise RequestError(f"{COMMIT} must be one of {', '.join(get_args(Commit))}; got {commit!r:.80}. Use one.")
    _check_count(CHECK_EVERY, check_every, 0, None, "Use 0 to check nothing.")
    _check_count(RING_CAPACITY, ring_capacity, 1, MAX_ROWS, "Use 16, say.")
    if widths is None:
        return
    _check_widths(widths)
    if commit == "store_all":
        raise RequestError(
            f"{WIDTHS} needs a commit policy that rebuilds one state of a tree; got {list(widths)} and {COMMIT} "
            f'\'store_all\'. Add "{COMMIT}": "reconstruct" or "ring", or leave {WIDTHS} out.'
        )


def _check_widths(widths: Any) -> None:
    if not isinstance(widths, tuple) or not widths or not all(_is_count(width) and width >= 1 for width in widths):
        given = list(widths) if isinstance(widths, tuple) else widths
        raise RequestError(
            f"{WIDTHS} must be positive integers, the children of a row at each level, as in [3, 3, 3]; got {given!r:.80}. "
            "Leave it out to draft a chain."
        )
    if 1 + num_drafts(widths) > MAX_ROWS:
        raise RequestError(
            f"A draft tree must have at most {MAX_ROWS} rows, root included; {WIDTHS} {list(widths)!r:.80} has more. Use "
            "fewer or narrower levels."
        )


def _check_count(name: str, value: Any, least: int, most: int | None, hint: str) -> None:
    if not _is_count(value) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} must be an integer {bounds}; got {value!r:.80}. {hint}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
