"""The public function that explains one site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from te_convert.capture.ambient import plain_modes
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig, Progress, patterns
from te_convert.errors import InputError
from te_convert.explain.model import Explanation
from te_convert.explain.site import explain_site
from te_convert.pipeline import check_model


@plain_modes()
def explain(
    model: nn.Module,
    fqn: str,
    example_inputs: Any = None,
    *,
    recipe: str | None = None,
    fuse: bool = True,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    context: int = 2,
    progress: Progress | None = None,
) -> Explanation:
    """Why one module would be converted as it would, or not: what each rule said, and the recorded graph around it.

    The model stays as it is.  A site of a fusion is also tried on a converted copy, so that its run-time counters are known.

    Args:
        model: as for :func:`analyze`, of which the other options are too.
        fqn: name of a module, "" or "(root)" for the root.
        example_inputs: as for :func:`convert`.
        recipe: see :func:`convert`.
        fuse: see :func:`convert`.
        include: see :func:`convert`.
        exclude: see :func:`convert`.
        allow: see :func:`convert`.
        context: how many steps of the recorded graph to show before and after the module.
        progress: called with (stage, done, total).

    Raises:
        InputError: no such module (the hint has names that are spelt like it), or what :func:`analyze` raises.

    Example:
        >>> import torch, te_convert
        >>> net = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
        >>> found = te_convert.explain(net, "1", (torch.randn(4, 32),))
        >>> [(attempt.rule, attempt.result) for attempt in found.attempts if attempt.result == "claimed"]
        [('linear', 'claimed'), ('norm-linear', 'claimed')]
    """
    config = ConvertConfig(recipe=recipe, fuse=fuse, progress=progress, **patterns(include, exclude, allow))
    check_model(model, "explain")
    if context < 0:
        raise InputError(f"context is {context}", "pass how many steps of the graph to show, 0 or more")
    return explain_site(model, fqn, normalize_inputs(example_inputs), config, context)
