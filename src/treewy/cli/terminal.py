"""What a person at a terminal sees while something runs; nothing elsewhere."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def status(what: str) -> AbstractContextManager[Any]:
    """Say on a terminal what takes time; elsewhere nothing."""
    console = Console(stderr=True)
    return console.status(f"{what} ...") if console.is_terminal else nullcontext()


def progress_bar() -> Progress:
    """Return a bar on stderr that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
