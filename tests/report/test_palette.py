"""The page's colours: readable in light and dark, and apart from each other for readers who see fewer of them."""

from __future__ import annotations

import itertools
import re

import pytest

from te_convert.report.html import render_html
from tests.report.sample_reports import hostile

TEXT = ("text", "soft", "link", "good", "warn", "bad")
OUTCOMES = ("converted", "fused", "refused", "excluded", "nomatch")

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1.0.
DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def palettes() -> dict[str, dict[str, str]]:
    light, dark = render_html(hostile()).split("@media (prefers-color-scheme: dark)", 1)
    return {
        "light": dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light)),
        "dark": dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", dark)),
    }


def linear_rgb(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB, white point D65."""
    rows = ((0.4124, 0.3576, 0.1805, 0.95047), (0.2126, 0.7152, 0.0722, 1.0), (0.0193, 0.1192, 0.9505, 1.08883))
    xyz = [sum(a * c for a, c in zip(row, rgb, strict=False)) / row[3] for row in rows]
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def seen(colour: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    rgb = linear_rgb(colour)
    return lab([min(max(sum(a * c for a, c in zip(row, rgb, strict=True)), 0.0), 1.0) for row in matrix])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_readable(scheme: str) -> None:
    colours = palettes()[scheme]
    for name, ground in itertools.product((*TEXT, *OUTCOMES, "elsewhere"), ("page", "card")):
        assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)  # WCAG 2.1 AA for normal text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_converted_and_refused_stay_apart_without_colour_vision(scheme: str, deficiency: str) -> None:
    colours = palettes()[scheme]
    one, two, three = (seen(colours[name], DEFICIENCIES[deficiency]) for name in ("converted", "fused", "refused"))
    for other in (one, two):
        assert sum((a - b) ** 2 for a, b in zip(other, three, strict=True)) ** 0.5 >= 20  # about ten just noticeable differences
