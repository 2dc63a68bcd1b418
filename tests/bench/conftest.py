"""Makes the modules of benchmarks/ importable, as they are for one another."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))
