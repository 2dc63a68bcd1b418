"""What the tests with real vLLM share: checkpoints written once, engines run once per description."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import models
import pytest

import engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that writes a model once, as `models.write_model` does, and returns its folder."""
    written: dict[str, Path] = {}

    def get(name: str, *, seed: int = 0, **overrides: object) -> str:
        key = json.dumps([name, seed, overrides], sort_keys=True)
        if key not in written:
            folder = tmp_path_factory.mktemp(name)
            written[key] = models.write_model(folder, name, seed=seed, **overrides)
        return str(written[key])

    return get


@pytest.fixture(scope="session")
def execute() -> Callable[[engine.Run], engine.Report]:
    """Return `engine.execute`, which runs equal descriptions once; a failure is as good a result as any."""
    done: dict[str, engine.Report | engine.EngineError] = {}

    def get(run: engine.Run) -> engine.Report:
        key = json.dumps(asdict(run), sort_keys=True)
        if key not in done:
            try:
                done[key] = engine.execute(run)
            except engine.EngineError as error:
                done[key] = error
        if isinstance(found := done[key], engine.EngineError):
            raise found
        return found

    return get
