"""The type checker that the import hook of conftest.py applies to every function and dataclass of treewy."""

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

# PEP 484 lets an int stand for a float; NumPy scalars stand for Python's wherever the code takes numbers one by one.
checked = beartype(
    conf=BeartypeConf(
        hint_overrides=FrozenDict(
            {int: int | np.integer, float: float | int | np.floating | np.integer},
        )
    )
)
