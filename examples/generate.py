"""Three prompts, three draft shapes, one batch: python examples/generate.py."""

import treewy

engine = treewy.load()  # the checkpoint that ships with treewy; or a folder, or a hub id
prompts = ["The captain looked at the sea and", "def fibonacci(n):", "In the beginning"]
shapes = [treewy.DraftTree.chain(3), treewy.DraftTree.from_widths([3, 3, 3]), treewy.DraftTree([-1, 0, 0, 1, 3])]
params = [treewy.SamplingParams(max_new_tokens=32, shape=shape) for shape in shapes]
for prompt, generation in zip(prompts, engine.generate(prompts, params), strict=True):
    print(f"{prompt}|{generation.text}")
    print(f"  {generation.mean_accept_len:.2f} tokens a step, {generation.state_bytes / 2**20:.2f} MiB of state\n")
