"""Checkpoints, and models loaded from them by transformers itself, for every test of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixtures import checkpoint, checkpoints, text_checkpoint
from fixtures_families import write_family

__all__ = ["checkpoint", "checkpoints", "families", "model", "text_checkpoint", "text_model"]


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> PreTrainedModel:
    """The model of each layout's checkpoint, float32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def text_model(text_checkpoint: Path) -> PreTrainedModel:
    """The text-only checkpoint's model, float32."""
    return AutoModelForCausalLM.from_pretrained(text_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that writes a layout's checkpoint and loads its model, once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(layout: str) -> tuple[Path, Any]:
        if layout not in made:
            folder = write_family(tmp_path_factory.mktemp(layout), layout)
            made[layout] = folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return made[layout]

    return get
