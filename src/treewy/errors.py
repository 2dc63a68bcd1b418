"""The error tree. Every message has three parts: what must hold, what was given, what to do."""


class TreeWYError(Exception):
    """Base of every error treewy raises on purpose."""


class TreeError(TreeWYError, ValueError):
    """A draft tree is malformed."""


class ShapeError(TreeWYError, ValueError):
    """Operands do not fit each other or the tree."""


class RequestError(TreeWYError, ValueError):
    """A request cannot be served as asked: bad prompt, option or file."""


class UnsupportedError(TreeWYError):
    """The combination asked for is not supported by this model, policy or version."""


class BackendError(TreeWYError):
    """A backend was asked for by name and cannot run here.

    Args:
        message: What must hold, what was given, what to do.
        install: The command that would make the backend available, if there is one.
    """

    def __init__(self, message: str, install: str | None = None) -> None:
        super().__init__(message if install is None else f"{message} Install it with: {install}")
        self.install = install


class CapacityError(TreeWYError):
    """A pool or context has no room, or a slot is not in the state the call needs."""
