"""A Triton backend "cpu" that generates no code: with TRITON_INTERPRET=1 kernels run in Triton's interpreter.

vLLM's CPU build takes Triton, and with it the model runner it uses on GPUs, only where such a backend is registered.
"""
