"""Any number of tokens under any recipe: rows are added for TE's quantised products and cut off again.

TE raises for a number of rows that its recipe does not divide, and one decoded token is one row.  The rows added repeat the last
one, so no scale changes; the gradients of their outputs are zero, so no gradient does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from te_convert.replacements.recipes import rows_multiple

PADDED = ("Linear", "LayerNormLinear", "LayerNormMLP")
"""TE's modules with products whose rows are those of their input; grouped products get theirs from the experts."""


def run_padded(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``forward(x, ...)`` for a TE module, with rows added as the recipe in force wants them.

    Args:
        forward: takes [..., in] and returns [..., out], alone or in a tuple with a bias and the normalised input.
        x: [..., in].
        args: more for ``forward``.
        kwargs: more for ``forward``.

    Returns:
        What ``forward`` returns, of the rows of ``x`` alone.
    """
    multiple = rows_multiple()
    rows = x.numel() // x.shape[-1] if multiple > 1 and x.shape[-1] else 0
    added = -rows % multiple
    if not added:
        return forward(x, *args, **kwargs)
    flat = x.reshape(rows, x.shape[-1])
    filled = torch.cat([flat, flat[-1:].detach().expand(added, -1)])

    def cut(y: Tensor) -> Tensor:
        """Of a bias nothing."""
        return y if y.dim() < 2 else y[:rows].view(*x.shape[:-1], y.shape[-1])

    return tree_map_only(Tensor, cut, forward(filled, *args, **kwargs))
