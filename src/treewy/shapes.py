"""The axis alphabet and the array aliases every signature uses.

| letter | meaning                         | letter | meaning                        |
|--------|---------------------------------|--------|--------------------------------|
| B, S   | sequences, pool slots           | K, V   | key, value head dims           |
| N      | packed rows of all trees        | C      | conv channels; history rows    |
| T      | tree rows of one sequence       | W      | conv width                     |
| P      | accepted path length            | L      | layers                         |
| H, HV  | key, value heads of GDN         | D      | depth                          |
| HQ, HK | query, KV heads of attention    | E      | attention head dim             |
| Q      | query rows, a subset of N       | M      | places of a KV cache           |
| B1     | B + 1                           | W1     | W - 1                          |
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Array = np.ndarray
# Decorates what makes tensors that outlive a step: made in inference mode they could not be written, or trained
# through, outside it.
lasting = torch.inference_mode(False)

__all__ = ["Array", "Bool", "Float", "Int", "Tensor", "lasting"]
