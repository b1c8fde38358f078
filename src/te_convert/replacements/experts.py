"""The experts of a mixture on te.GroupedLinear: tokens sorted by expert, two grouped products, results added up by token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.activations import ACTIVATIONS
from te_convert.replacements.specs import GroupedExpertsSpec, torch_dtype

META = "meta"
"""The string: TE tests ``device == "meta"``, which is False for torch.device("meta")."""


class GroupedExperts(nn.Module):
    """``sum_k weight[t, k] * fc2_e(act(fc1_e(x[t])))`` with ``e = index[t, k]``; the router is outside.

    Children ``fc1`` and ``fc2`` are GroupedLinear modules of the backend, with parameters ``weight{expert}`` [out, in].
    """

    linear: type[nn.Module]

    def __init__(self, spec: GroupedExpertsSpec) -> None:
        super().__init__()
        rows = spec.ffn_hidden_size * (2 if spec.gated else 1)
        self.num_gemms, self.gated, self.activation = spec.num_gemms, spec.gated, spec.activation
        self.row_multiple = spec.row_multiple
        self.fc1 = self._grouped(spec.num_gemms, spec.hidden_size, rows, spec.dtype)
        self.fc2 = self._grouped(spec.num_gemms, spec.ffn_hidden_size, spec.hidden_size, spec.dtype)

    def _grouped(self, count: int, columns: int, rows: int, dtype: str) -> nn.Module:
        args, kwargs = grouped_arguments(self.linear, count, columns, rows, dtype)
        return self.linear(*args, **kwargs)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Tokens through their experts.

        Args:
            hidden: [tokens, hidden_size].
            index: [tokens, k], the experts of each token; ``num_gemms`` means none.
            weights: [tokens, k], what each expert's result is multiplied by.

        Returns:
            [tokens, hidden_size] in the dtype of ``hidden``.
        """
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        splits: list[int] = torch.bincount(chosen, minlength=self.num_gemms + 1)[: self.num_gemms].tolist()
        order = order[: sum(splits)]
        tokens = order // index.shape[-1]
        rows = hidden[tokens]
        place: Tensor | None = None
        if self.row_multiple > 1:
            rows, splits, place = pad_rows(rows, splits, self.row_multiple)
        inner = self.fc1(rows, splits)
        act = ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        out = self.fc2(inner, splits)
        if place is not None:
            out = out[place]
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, tokens, out.to(hidden.dtype))


def grouped_arguments(
    linear: type[nn.Module], count: int, columns: int, rows: int, dtype: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a backend's GroupedLinear: ``count`` weights [rows, columns] on meta."""
    keywords: dict[str, Any] = {"bias": False, "params_dtype": torch_dtype(dtype), "device": META}
    if "init_method" in inspect.signature(linear.__init__).parameters:
        keywords["init_method"] = _keep
    return (count, columns, rows), keywords


def pad_rows(rows: Tensor, splits: list[int], multiple: int) -> tuple[Tensor, list[int], Tensor]:
    """Zero rows after each group, so that its size is a multiple.

    Args:
        rows: [sum(splits), n].
        splits: rows of each group.
        multiple: of what the sizes become.

    Returns:
        The padded rows, the padded sizes, and where each row is now.
    """
    padded = [-(-size // multiple) * multiple for size in splits]
    sizes = torch.tensor(splits)
    shift = torch.tensor([0, *padded]).cumsum(0)[:-1] - torch.tensor([0, *splits]).cumsum(0)[:-1]
    place = (torch.arange(len(rows)) + shift.repeat_interleave(sizes)).to(rows.device)
    return rows.new_zeros(sum(padded), rows.shape[1]).index_copy(0, place, rows), padded, place


def _keep(weight: Any) -> None:
    """An ``init_method`` that leaves the weight alone."""


_CLASSES: dict[type[nn.Module], type[GroupedExperts]] = {}


def experts_class(linear: type[nn.Module]) -> type[GroupedExperts]:
    """:class:`GroupedExperts` on a backend's GroupedLinear."""
    if linear not in _CLASSES:
        _CLASSES[linear] = type("GroupedExperts", (GroupedExperts,), {"linear": linear, "__module__": __name__})
    return _CLASSES[linear]
