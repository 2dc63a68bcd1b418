"""The embedded engine: a batch of requests, one draft tree each per step."""

from treewy.engine.engine import Engine
from treewy.engine.request import Generation, SamplingParams
from treewy.engine.session import Session
from treewy.engine.stream import StreamEvent, TokenKind, TokenLogprobs

__all__ = ["Engine", "Generation", "SamplingParams", "Session", "StreamEvent", "TokenKind", "TokenLogprobs"]
