"""The embedded engine: a batch of requests, one draft tree each per step."""

from treewy.engine.engine import Engine
from treewy.engine.request import Generation, SamplingParams
from treewy.engine.stream import StreamEvent, TokenKind

__all__ = ["Engine", "Generation", "SamplingParams", "StreamEvent", "TokenKind"]
