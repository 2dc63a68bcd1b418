"""What every test of this folder runs under."""

from one_thread import one_thread

__all__ = ["one_thread"]
