"""treewy: lossless tree speculative decoding for hybrid LLMs with Gated DeltaNet layers."""
