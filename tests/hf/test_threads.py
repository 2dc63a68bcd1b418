"""Engines over one model in several threads take turns."""

from concurrent.futures import ThreadPoolExecutor

import torch

from treewy.engine import SamplingParams
from treewy.hf.checkpoint import SHIPPED, load_model
from treewy.hf.load import build_engine
from treewy.tree import DraftTree


def test_two_engines_over_one_model_in_two_threads() -> None:
    model = load_model(SHIPPED, torch.float32, "cpu")
    shapes = [DraftTree.chain(2), DraftTree.from_widths([2, 2])]
    engines = [build_engine(model, draft="mtp", folder=SHIPPED, shape=shape) for shape in shapes]
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].token_ids for engine, prompt in zip(engines, prompts, strict=True)]
    implementation = model.config._attn_implementation
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(engine.generate, [prompt], params) for engine, prompt in zip(engines, prompts, strict=True)
        ]
        together = [run.result()[0].token_ids for run in runs]
    assert together == alone
    assert model.config._attn_implementation == implementation
    assert not any("forward" in module.__dict__ for module in model.modules())
