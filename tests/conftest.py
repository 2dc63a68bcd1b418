"""What every test runs under: annotations enforced, one Hypothesis profile, one thread, and no silent skips."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from ops import typecheck

# Before the first import of triton: where there is no GPU, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("ops.problems", "ops.checks")

# Before the first import of treewy: from here on every annotation in it is a check, shapes and types.
install_import_hook("treewy", f"{typecheck.__name__}.checked")

# Modules of benchmarks/ find each other there.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

# The tests' tensors are tiny: a second thread gains nothing, and on a busy machine its barriers cost tenfold.
torch.set_num_threads(1)

# These run vLLM, in an environment of their own (scripts/check).
collect_ignore = ["vllm"]

settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class SkipRule:
    """Fails a run in which a test was skipped that was not marked `gpu`, or any test on a machine with a GPU.

    A skip hides a test that somebody counts on. Modules that skip themselves while they are collected count as well;
    expected failures do not, they are in the summary under their own name.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.skipped = 0
        self.refused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when == "call":
            self.passed += 1
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report.nodeid, allowed="gpu" in report.keywords and not torch.cuda.is_available())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skip(report.nodeid, allowed=False)

    def _skip(self, name: str, *, allowed: bool) -> None:
        self.skipped += 1
        if not allowed:
            self.refused.append(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self.passed} passed, {self.skipped} skipped, {len(self.refused)} refused skips")
        for name in self.refused:
            terminalreporter.write_line(f"REFUSED SKIP {name}: only tests marked gpu may skip, and only without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    # The type checker looks at one random item of each list; Hypothesis sees that as a strategy using `random`.
    config.addinivalue_line("filterwarnings", "ignore:Do not use the `random` module inside strategies")
    if not hasattr(config, "workerinput"):  # one count, in the process that reports
        config.pluginmanager.register(SkipRule(), "skip-rule")
