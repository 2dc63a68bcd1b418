"""Reported faults of the command line: what fails is seen to fail."""

import pytest

from treewy.cli.main import main
from treewy.errors import BackendError, TreeWYError
from treewy.hf import HFTarget


@pytest.mark.parametrize("error", [BackendError("A kernel must run; it did not."), OSError("planted")])
@pytest.mark.parametrize("call", [1, 4])
def test_a_verify_that_fails_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: int, error: TreeWYError | OSError
) -> None:
    """Fault G12: verify raises once, in the first step or in a later one: exit code 1, one line, no half answer as JSON."""
    calls, verify = 0, HFTarget.verify

    def planted(self, batch, cache):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return verify(self, batch, cache)

    monkeypatch.setattr(HFTarget, "verify", planted)
    assert main(["generate", "It was", "--json", "--max-new-tokens", "8"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(error).split(";", maxsplit=1)[0] in captured.err
