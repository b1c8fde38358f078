"""Figures of two results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from te_convert.verify.model import Figures
from te_convert.verify.tolerance import rounding_floor

MISMATCH = Figures(-math.inf, math.inf, bit_equal=False, numel=0)
"""Figures of results that cannot be compared: other shapes, other non-finite positions, a missing output."""

Outputs = Sequence[tuple[str, torch.Tensor]]


def compare(original: torch.Tensor, converted: torch.Tensor) -> Figures:
    """Figures over the finite elements; non-finite ones must sit at the same places with the same values.

    Another shape or another dtype cannot be compared.
    """
    if original.is_nested and converted.is_nested:
        return _compare_nested(original, converted)
    if original.is_nested or converted.is_nested or original.shape != converted.shape or original.dtype != converted.dtype:
        return MISMATCH
    if original.numel() == 0 or _same(original, converted):
        return Figures(math.inf, 0.0, bit_equal=True, numel=original.numel())
    a, b = _as_float64(original), _as_float64(converted)
    if not (_all_finite(a) and _all_finite(b)):
        finite = torch.isfinite(a)
        if not bool(torch.equal(finite, torch.isfinite(b))) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return MISMATCH
        a, b = a[finite], b[finite]
    a, difference = a.flatten(), (b - a).flatten()
    worst, peak = _peak(difference), _peak(a)
    if worst == 0.0:
        return Figures(math.inf, 0.0, bit_equal=True, numel=original.numel())
    signal, noise = float(a.dot(a)), float(difference.dot(difference))
    sqnr = 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    return Figures(sqnr, worst / peak if peak > 0 else math.inf, bit_equal=False, numel=original.numel())


def _same(original: torch.Tensor, converted: torch.Tensor) -> bool:
    return original.layout is torch.strided and torch.equal(original, converted)


def _all_finite(values: torch.Tensor) -> bool:
    """In one pass: the smallest and the largest value are NaN when any is."""
    return all(math.isfinite(float(end)) for end in torch.aminmax(values))


def _peak(values: torch.Tensor) -> float:
    """The largest magnitude; 0 of nothing."""
    return max(abs(float(end)) for end in torch.aminmax(values)) if values.numel() else 0.0


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def _compare_nested(original: torch.Tensor, converted: torch.Tensor) -> Figures:
    parts, others = original.unbind(), converted.unbind()
    if len(parts) != len(others):
        return MISMATCH
    return worst_of(("", compare(a, b)) for a, b in zip(parts, others, strict=True))[1]


def worst_of(figures: Iterable[tuple[str, Figures]]) -> tuple[str, Figures]:
    """The entry with the lowest SQNR (largest relative error among equals); a perfect entry when there is none."""
    entries = list(figures)
    if not entries:
        return "", Figures(math.inf, 0.0, bit_equal=True, numel=0)
    name, worst = min(entries, key=lambda entry: (entry[1].sqnr_db, -entry[1].max_rel))
    return name, Figures(
        worst.sqnr_db,
        max(f.max_rel for _, f in entries),
        bit_equal=all(f.bit_equal for _, f in entries),
        numel=sum(f.numel for _, f in entries),
    )


def compare_outputs(original: Outputs, converted: Outputs) -> tuple[str, Figures]:
    """The worst output of two runs, by path."""
    if [path for path, _ in original] != [path for path, _ in converted]:
        return "the outputs have another structure", MISMATCH
    return worst_of((path, compare(a, b)) for (path, a), (_, b) in zip(original, converted, strict=True))


def error_ratio(reference: Outputs, original: Outputs, converted: Outputs, dtype: torch.dtype) -> tuple[float, int]:
    """(rms error of the converted run over the original's, elements), both against the float32 reference.

    Each floating output is scaled by the reference's rms first.  The original's error counts at least as one rounding of the exact
    result, so that an original that happens to be exact does not forbid a correctly rounded result.
    """
    own, other, numel = 0.0, 0.0, 0
    for (_, exact), (_, a), (_, b) in zip(reference, original, converted, strict=True):
        if exact.is_nested or not exact.is_floating_point() or exact.shape != b.shape or exact.shape != a.shape:
            continue
        exact, a, b = (t.detach().to(torch.float64) for t in (exact, a, b))
        finite = torch.isfinite(exact) & torch.isfinite(a) & torch.isfinite(b)
        scale = float(exact[finite].pow(2).mean().sqrt()) if bool(finite.any()) else 0.0
        if scale == 0.0:
            continue
        own += float(((a - exact)[finite] / scale).pow(2).sum())
        other += float(((b - exact)[finite] / scale).pow(2).sum())
        numel += int(finite.sum())
    if numel == 0:
        return 1.0, 0
    own_rms, other_rms = math.sqrt(own / numel), math.sqrt(other / numel)
    return other_rms / max(own_rms, rounding_floor(dtype)), numel


def row_ratios(reference: Outputs, original: Outputs, converted: Outputs, dtype: torch.dtype) -> list[float]:
    """:func:`error_ratio` of each batch row alone: rows are separate sequences or images, so separate draws of rounding noise.

    One value for the whole run when the outputs do not share their first dimension.
    """
    sizes = {t.shape[0] if t.dim() else 0 for _, t in reference if not t.is_nested and t.is_floating_point()}
    if len(sizes) != 1 or max(sizes) < 2:
        ratio, numel = error_ratio(reference, original, converted, dtype)
        return [ratio] if numel else []
    ratios = []
    for row in range(max(sizes)):
        exact, own, other = (_row(side, row) for side in (reference, original, converted))
        ratio, numel = error_ratio(exact, own, other, dtype)
        ratios += [ratio] if numel else []
    return ratios


def _row(outputs: Outputs, row: int) -> Outputs:
    return [(path, t[row]) for path, t in outputs if t.is_floating_point()]
