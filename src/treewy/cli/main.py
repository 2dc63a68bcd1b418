"""Entry point: parse, run, and turn every error into one clear line and an exit code."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import tyro

from treewy.cli.doctor import Doctor
from treewy.cli.generate import Generate
from treewy.errors import TreeWYError

OK, FAILED, USAGE = 0, 1, 2
PROGRAM = "treewy"
DESCRIPTION = "Lossless tree speculative decoding for hybrid LLMs."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 (failed) or 2 (usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = _parse(arguments)
        command.run()
    except SystemExit as stop:  # --help, or a usage error that has been reported
        return int(stop.code or 0)
    except (TreeWYError, ValueError) as error:
        _report(error)
        # A bad request is the caller's to mend; anything else failed here.
        return USAGE if isinstance(error, ValueError) else FAILED
    except BrokenPipeError:
        # The reader of stdout went away: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        _report("interrupted.")
        return FAILED
    return OK


def _parse(arguments: list[str]) -> Generate | Doctor:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                {"generate": Generate, "doctor": Doctor},
                prog=PROGRAM,
                description=DESCRIPTION,
                args=arguments or ["--help"],
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code:
            _report(_one_line(errors.getvalue()))
        raise


def _one_line(box: str) -> str:
    """Flatten tyro's framed message to one line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│╭╮╰╯─┌┐└┘|+- \n") for line in box.splitlines()]
    words: list[str] = []
    # The frame's title says nothing the message does not, and the help it repeats is one command away.
    for line in filter(None, lines[1:]):
        if line.startswith(("Argument helptext", "For full helptext", "Got errors")):
            break
        words.append(line.rstrip(".;"))
    return f"{' '.join(words)}. See: {PROGRAM} --help"


def _report(error: object) -> None:
    text = " ".join(str(error).split())
    print(f"{PROGRAM}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
