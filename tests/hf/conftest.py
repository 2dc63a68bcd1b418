"""Checkpoints, and models loaded from them by transformers itself, for every test of this folder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixtures import checkpoint, checkpoints, text_checkpoint

__all__ = ["checkpoint", "checkpoints", "model", "text_checkpoint", "text_model"]


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> PreTrainedModel:
    """The model of each layout's checkpoint, float32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def text_model(text_checkpoint: Path) -> PreTrainedModel:
    """The text-only checkpoint's model, float32."""
    return AutoModelForCausalLM.from_pretrained(text_checkpoint, dtype=torch.float32).eval()
