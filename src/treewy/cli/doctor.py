"""`treewy doctor`: versions, devices, and which backends work here, tried rather than assumed."""

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff

from treewy.errors import BackendError

if TYPE_CHECKING:
    from treewy.cli.trials import Trial

PACKAGES = ("treewy", "torch", "transformers", "safetensors", "tokenizers", "numpy", "triton")


@dataclass(frozen=True)
class Check:
    """One thing tried: whether it works, and what was seen."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True)
class Doctor:
    """Show versions and devices, and try every backend of every op and the shipped checkpoint.

    Kernels are tried where they can run: on a GPU, or in Triton's interpreter. Without either they need a GPU, which is no
    failure.
    """

    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object."""

    def run(self) -> None:
        """Run the command; raises BackendError if something that should work does not."""
        checks, ops = _try_ops()
        checks.append(_try_checkpoint())
        report = {
            "python": platform.python_version(),
            "packages": {name: package_version(name) for name in PACKAGES},
            "devices": _devices(),
            "ops": ops,
            "checks": [asdict(check) for check in checks],
        }
        if self.json:
            print(json.dumps(report))
        else:
            _print(report)
        failed = [check.name for check in checks if not check.works]
        if failed:
            raise BackendError(f"Every backend must work here; {', '.join(failed)} does not. See the report above.")


def package_version(package: str) -> str | None:
    """Return the installed version of `package`, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [f"cpu ({torch.get_num_threads()} threads)", *(f"cuda:{i} {name}" for i, name in enumerate(names))]


def _try_ops() -> tuple[list[Check], dict[str, dict[str, str]]]:
    """Run a small problem through every backend of every op, on every device that it should work on.

    Returns:
        What was tried, and per op and backend of `dispatch.BACKENDS` one word on it.
    """
    import torch

    from treewy.cli.trials import TRIALS, runs_on
    from treewy.ops.dispatch import BACKENDS

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    checks: list[Check] = []
    words: dict[str, dict[str, str]] = {}
    for trial in TRIALS:
        words[trial.op] = {}
        for backend in BACKENDS:
            here = [device for device in devices if backend in trial.backends and runs_on(backend, device)]
            tried = [_try_backend(trial, backend, device) for device in here]
            words[trial.op][backend] = _word(backend in trial.backends, tried)
            checks += tried
    return checks, words


def _word(exists: bool, tried: list[Check]) -> str:
    if not exists:
        return "none"
    if not tried:
        return "needs a GPU"
    return "works" if all(check.works for check in tried) else "does not work"


def _try_backend(trial: "Trial", backend: str, device: str) -> Check:
    name, bound = f"ops.{trial.op} {backend} on {device}", trial.bound_of(backend)
    try:
        error = trial.error(backend, device)
    except Exception as error:  # whatever a backend that is broken here raises is what was to be found out
        return Check(name, False, (str(error).splitlines() or [type(error).__name__])[0])
    return Check(name, error <= bound, f"relative error {error:.1e} against the reference (bound {bound:.0e})")


def _try_checkpoint() -> Check:
    from treewy.errors import TreeWYError
    from treewy.hf.checkpoint import SHIPPED, load_mtp_weights

    try:
        weights = load_mtp_weights(SHIPPED)
    except TreeWYError as error:
        return Check("shipped checkpoint", False, str(error))
    detail = "no MTP head" if weights is None else f"MTP head of {len(weights)} tensors"
    return Check("shipped checkpoint", weights is not None, detail)


def _print(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from treewy.ops.dispatch import BACKENDS

    console = Console(highlight=False)
    versions = ", ".join(f"{name} {v}" for name, v in report["packages"].items() if v)
    console.print(f"python {report['python']}, {versions}")
    missing = [name for name, v in report["packages"].items() if not v]
    if missing:
        console.print(f"not installed: {', '.join(missing)}")
    console.print("devices: " + ", ".join(report["devices"]))
    backends = Table("op", *BACKENDS)
    for op, words in report["ops"].items():
        backends.add_row(op, *(f"[red]{word}[/]" if word == "does not work" else word for word in words.values()))
    console.print(backends)
    table = Table("check", "works", "detail")
    for check in report["checks"]:
        table.add_row(check["name"], "yes" if check["works"] else "[red]no[/]", check["detail"])
    console.print(table)
