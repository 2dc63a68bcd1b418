"""The half of a backend that compiles; here it refuses."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Compiles nothing: a kernel that gets here was not given to the interpreter."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Say whether the target is the one of the driver beside."""
        return target.backend == "cpu"

    def hash(self) -> str:
        """Return a key for a compilation cache that stays empty."""
        return "interpreter"

    def parse_options(self, options: dict) -> object:
        """Take any options; they are for code that is not generated."""
        return object()

    def add_stages(self, stages: dict, options: object, language: object) -> None:
        """Refuse to compile."""
        raise NotImplementedError("This backend compiles nothing. Set TRITON_INTERPRET=1 before triton is imported.")

    def load_dialects(self, context: object) -> None:
        """Load none."""

    def get_module_map(self) -> dict:
        """Replace no module."""
        return {}
