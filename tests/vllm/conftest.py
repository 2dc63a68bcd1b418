"""What the tests with real vLLM share: each checkpoint is written once, each description is run once.

That holds across the processes of pytest-xdist. What one has done lies in the folder of the session, under a lock.
"""

import fcntl
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import engine


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session; every process of pytest-xdist has its own below it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def once(folder: Path, key: object, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, called once per key in all processes that share the folder."""
    name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    made = folder / f"{name}.pickle"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(make()))
    return pickle.loads(made.read_bytes())


@pytest.fixture(scope="session")
def model(shared: Path) -> Callable[..., str]:
    """Return a function that writes a model once, as `models.write_model` does, and returns its folder."""

    def get(name: str, *, seed: int = 0, **overrides: Any) -> str:
        options = json.dumps(overrides, sort_keys=True)
        folder = shared / f"{name}-{seed}-{sha256(options.encode()).hexdigest()[:8]}"
        once(shared, str(folder), lambda: models.write_model(folder, name, seed=seed, **overrides))
        return str(folder)

    return get


@pytest.fixture(scope="session")
def execute(shared: Path) -> Callable[[engine.Run], engine.Report]:
    """Return `engine.execute`, which runs equal descriptions once; a failure is as good a result as any."""

    def attempt(run: engine.Run) -> engine.Report | engine.EngineError:
        try:
            return engine.execute(run)
        except engine.EngineError as error:
            return error

    def get(run: engine.Run) -> engine.Report:
        result = once(shared, asdict(run), lambda: attempt(run))
        if isinstance(result, engine.EngineError):
            raise result
        return result

    return get
