"""Declare torchvision's operators just before it is imported, so that its CUDA-linked build imports beside torch for CPUs.

Model code of vLLM imports torchvision for images. Its shared library cannot be loaded without CUDA, and then its Python half
fails on operators that the library would have declared. Nobody calls them. A `.pth` file imports this module at start.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    """Finds nothing; when torchvision is looked for, its operators are declared and this finder leaves."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        # Kept on the class: a library that is collected takes its declarations with it.
        type(self).library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
