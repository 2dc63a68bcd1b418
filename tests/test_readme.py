"""The README runs: its commands, its snippet, its numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from treewy.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[str]:
    lines = [line.split("   #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line.startswith("treewy ")]


def test_every_command_in_the_readme_is_understood() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("command", commands())
def test_readme_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    arguments = shlex.split(command)[1:]
    if "DIR_OR_HUB_ID" in arguments:
        arguments = [
            word if word != "DIR_OR_HUB_ID" else str(ROOT / "src/treewy/assets/checkpoint") for word in arguments
        ]
    if arguments[0] == "generate":
        arguments += ["--max-new-tokens", "8"]
    if arguments[0] == "bench":
        arguments += ["--rounds", "1", "--max-new-tokens", "8"]
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_readme_snippet() -> None:
    (snippet,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout


def test_exactly_two_set_up_commands_and_both_exist() -> None:
    scripts = [line.split()[0] for line in "\n".join(blocks("")).splitlines() if line.startswith("./")]
    assert scripts == ["./scripts/demo", "./scripts/test"]
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o100


def test_the_tables_are_those_of_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/report.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "DESIGN.md",
        "CONTRIBUTING.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"
