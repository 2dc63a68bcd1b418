"""`treewy doctor`: versions, devices, and which backends work here, tried rather than assumed."""

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from treewy.errors import BackendError

PACKAGES = ("treewy", "torch", "transformers", "safetensors", "tokenizers", "numpy", "triton")


@dataclass(frozen=True)
class Check:
    """One thing tried: whether it works, and what was seen."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True)
class Doctor:
    """Show versions and devices, and try every backend and the shipped checkpoint."""

    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object."""

    def run(self) -> None:
        """Run the command; raises BackendError if something that should work does not."""
        checks = [*_try_backends(), _try_checkpoint()]
        report = {
            "python": platform.python_version(),
            "packages": {name: package_version(name) for name in PACKAGES},
            "devices": _devices(),
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


def _try_backends() -> list[Check]:
    """Run a small tree through every backend on every device and compare with the sequential walk."""
    import torch

    from treewy.ops.dispatch import BACKENDS

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [_try_backend(backend, device) for device in devices for backend in BACKENDS]


def _try_backend(backend: str, device: str) -> Check:
    import torch

    from treewy.ops import gdn
    from treewy.packed import pack
    from treewy.tree import DraftTree

    name, bound = f"ops.gdn {backend} on {device}", 1e-5
    tree = pack([DraftTree.from_widths([3, 3, 3]), DraftTree.chain(3)], device=device)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows = tree.num_rows
    q, k = gdn.scale_queries(random(rows, 2, 16)), gdn.l2_normalise(random(rows, 2, 16))
    operands = (q, k, random(rows, 4, 16), -random(rows, 4).abs(), random(rows, 4).sigmoid(), random(2, 4, 16, 16))
    slots = torch.tensor([1, 0], device=device)
    try:
        got = gdn.verify(*operands, slots, tree, backend=backend).o
    except (RuntimeError, BackendError) as error:
        return Check(name, False, str(error).splitlines()[0])
    want = gdn.verify_snapshots(*operands, slots, tree, backend="reference").o
    error = float((got - want).norm() / want.norm())
    return Check(name, error <= bound, f"relative error {error:.1e} against the float64 walk (bound {bound:.0e})")


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

    console = Console(highlight=False)
    versions = ", ".join(f"{name} {v}" for name, v in report["packages"].items() if v)
    console.print(f"python {report['python']}, {versions}")
    missing = [name for name, v in report["packages"].items() if not v]
    if missing:
        console.print(f"not installed: {', '.join(missing)}")
    console.print("devices: " + ", ".join(report["devices"]))
    table = Table("check", "works", "detail")
    for check in report["checks"]:
        table.add_row(check["name"], "yes" if check["works"] else "[red]no[/]", check["detail"])
    console.print(table)
