"""Draft for a transformers model you already have: python examples/transformers_model.py [FOLDER]."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import treewy
from treewy.hf.checkpoint import resolve

logging.set_verbosity_error()  # stock decoding notes that it has no fused kernels here
folder = resolve(sys.argv[1] if len(sys.argv) > 1 else None)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
input_ids = tokenizer("The captain looked at the sea and", return_tensors="pt").input_ids

drafted = treewy.generate(model, input_ids, max_new_tokens=32)
stock = model.generate(input_ids, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(drafted[0]))
print("equal to stock transformers:", torch.equal(drafted, stock))
