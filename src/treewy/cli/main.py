"""Entry point: parse, run, and turn every error into one clear line and an exit code."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import tyro

from treewy.cli.bench import BENCHMARKS, Bench
from treewy.cli.doctor import Doctor, package_version
from treewy.cli.generate import Generate
from treewy.cli.plan import Plan
from treewy.errors import TreeWYError

OK, FAILED, USAGE = 0, 1, 2
PROGRAM = "treewy"
DESCRIPTION = "Lossless tree speculative decoding for hybrid LLMs."
COMMANDS = {"generate": Generate, "plan": Plan, "bench": Bench, "doctor": Doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 (failed) or 2 (usage)."""
    if sys.stdout is None:
        _report("Results go to standard output; it is closed. Open it, or redirect it to a file.")
        return FAILED
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character shows a stand-in; JSON is plain ASCII anyway.
        sys.stdout.reconfigure(errors="replace")
    try:
        _parse(list(sys.argv[1:] if argv is None else argv)).run()
        sys.stdout.flush()
    except SystemExit as stop:  # --help, or a usage error that has been reported
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error)
    return OK


def _failed(error: Exception | KeyboardInterrupt) -> int:
    """Report an error in one line and return its exit code; what nobody foresaw keeps its traceback."""
    match error:
        case KeyboardInterrupt():
            _report("interrupted.")
        case BrokenPipeError():
            # The reader of stdout went away: nobody is left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        case ValueError():  # a bad request is the caller's to mend
            _report(error)
            return USAGE
        case TreeWYError():
            _report(error)
        case OSError() | MemoryError():
            _report(f"{type(error).__name__}: {error or 'no details'}")
        case _:
            raise error
    return FAILED


def _parse(arguments: list[str]) -> Generate | Plan | Bench | Doctor:
    if arguments in (["--version"], ["-V"]):
        print(f"{PROGRAM} {package_version(PROGRAM)}")
        raise SystemExit(OK)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog=PROGRAM,
                description=DESCRIPTION,
                args=arguments or ["--help"],
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code:
            _report(f"{_one_line(errors.getvalue())}. See: {' '.join((PROGRAM, *_command(arguments)))} --help")
        raise


def _command(arguments: list[str]) -> list[str]:
    """Return the words of the command that was asked for, as far as there is one."""
    command = [word for word in arguments[:1] if word in COMMANDS]
    return command + [word for word in arguments[1:2] if command == ["bench"] and word in BENCHMARKS]


def _one_line(box: str) -> str:
    """Flatten tyro's framed message to one line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│╭╮╰╯─┌┐└┘|+ \n") for line in box.splitlines()]
    lines = [line for line in lines if line.strip("-")]
    words: list[str] = []
    # The frame's title says nothing the message does not, and the help it repeats is one command away; what it takes for
    # the option that was meant is as often another command's.
    for line in filter(None, lines[1:]):
        if line.startswith(("Argument helptext", "For full helptext", "Got errors", "Perhaps you meant")):
            break
        words.append(line.rstrip(".;"))
    return " ".join(words).replace(" Available subcommands", "; available subcommands")


def _report(error: object) -> None:
    text = " ".join(str(error).split())
    print(f"{PROGRAM}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
