"""Who runs next: requests wait for a slot, prefill in chunks, then decode until they finish."""

from collections import deque

from treewy.cache import CachePool
from treewy.draft import Drafter
from treewy.engine.request import Request


class Scheduler:
    """Admits requests in order as slots come free, and takes slots back exactly once."""

    def __init__(self, cache: CachePool, drafter: Drafter) -> None:
        self.cache, self.drafter = cache, drafter
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Give free slots to waiting requests."""
        while self.waiting and self.cache.num_free:
            request = self.waiting.popleft()
            request.slot = self.cache.allocate()
            self.drafter.allocate(request.slot)
            self.running.append(request)

    def prefilling(self) -> list[Request]:
        """Return running requests with prompt tokens left."""
        return [request for request in self.running if request.prefilled < len(request.prompt)]

    def decoding(self) -> list[Request]:
        """Return running requests whose prompt is in the cache."""
        return [request for request in self.running if request.prefilled == len(request.prompt)]

    def release(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request.slot is not None:
            slot, request.slot = request.slot, None
            try:
                self.drafter.free(slot)
            finally:
                self.cache.free(slot)
