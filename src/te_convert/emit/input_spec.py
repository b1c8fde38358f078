"""Example inputs from text: ``input_ids:int64[2,128]:0..30522``."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_convert.errors import InputError

FORM = "write name:dtype[sizes]:low..high, for instance input_ids:int64[2,128]:0..30522, x:float32[2,16] or float32[2,3,224,224]"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool")
_TEXT = re.compile(r"(?:(?P<name>[^:\[\]]*):)?\s*(?P<dtype>[^:\[\]]*)\[(?P<sizes>[^\[\]]*)\]\s*(?::(?P<range>.*))?", re.DOTALL)
_DEFAULT_RANGE = (0, 2)
_MOST_ELEMENTS = 2**32


@dataclass(frozen=True)
class InputSpec:
    """One input tensor.

    Attributes:
        name: keyword, or None for a positional input.
        dtype: name of a torch dtype.
        sizes: the shape; empty for a scalar tensor.
        low: smallest value, or None for the default (floats: standard normal; integers: 0..2, which fits masks and tables).
        high: integers: the first value that does not occur; floats: the upper end of a uniform distribution.
    """

    name: str | None
    dtype: str
    sizes: tuple[int, ...]
    low: float | None = None
    high: float | None = None

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """A random tensor of this spec."""
        dtype = getattr(torch, self.dtype)
        if self.dtype == "bool":
            return torch.randint(0, 2, self.sizes, generator=generator).to(torch.bool)
        if self.dtype in _INTEGERS:
            low, high = _DEFAULT_RANGE if self.low is None or self.high is None else (int(self.low), int(self.high))
            return torch.randint(low, high, self.sizes, generator=generator, dtype=torch.int64).to(dtype)
        if self.low is None or self.high is None:
            return torch.randn(self.sizes, generator=generator, dtype=torch.float32).to(dtype)
        uniform = torch.rand(self.sizes, generator=generator, dtype=torch.float64)
        return (self.low + (self.high - self.low) * uniform).to(dtype)


def parse_inputs(texts: Sequence[str], *, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional and keyword inputs from texts; one text may hold several, separated by ``;``.

    The values come from a generator of their own: the same texts give the same tensors, and PyTorch's global generator is not
    touched.

    Raises:
        InputError: a malformed text (the message names the wrong part), a name given twice, or too large a tensor.
    """
    given: Any = [texts] if isinstance(texts, str) else texts
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise InputError("inputs are described by strings", FORM)
    pieces = [piece.strip() for text in given for piece in text.split(";")]
    specs = [parse_input(piece) for piece in pieces if piece]
    if not specs:
        raise InputError("no input is described", FORM)
    generator = torch.Generator().manual_seed(seed)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for spec, piece in zip(specs, (piece for piece in pieces if piece), strict=True):
        if spec.name is not None and spec.name in kwargs:
            raise InputError(f"input {piece!r}: {spec.name} is given twice", "give each name once")
        try:
            tensor = spec.make(generator)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"input {piece!r} cannot be made: {str(error).splitlines()[0]}", "give smaller sizes") from error
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def parse_input(text: str) -> InputSpec:
    """One input from its text.

    Raises:
        InputError: the text is malformed; the message names the wrong part and the hint shows the form.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise InputError(f"input {text!r}: {_what_is_missing(text)}", FORM)
    name, dtype = match["name"], match["dtype"].strip()
    if name is not None:
        name = name.strip()
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"input {text!r}: {name!r} is not an argument name", FORM)
    if dtype not in _DTYPES:
        raise InputError(f"input {text!r}: {dtype!r} is not a dtype; known are {', '.join(_DTYPES)}", FORM)
    sizes = _parse_sizes(match["sizes"], text)
    if match["range"] is None:
        return InputSpec(name, dtype, sizes)
    low, high = _parse_range(match["range"].strip(), dtype, text)
    return InputSpec(name, dtype, sizes, low, high)


def _what_is_missing(text: str) -> str:
    if "[" not in text:
        return "no sizes in brackets"
    if "]" not in text:
        return "the bracket is not closed"
    return "the parts are not name, dtype, [sizes] and range"


def _parse_sizes(text: str, whole: str) -> tuple[int, ...]:
    if not text.strip():
        return ()
    sizes = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,12}\s*", part):
            raise InputError(f"input {whole!r}: {part.strip()!r} is not a size", FORM)
        sizes.append(int(part))
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise InputError(f"input {whole!r}: {math.prod(sizes)} elements are too many", "give smaller sizes")
    return tuple(sizes)


def _parse_range(text: str, dtype: str, whole: str) -> tuple[float, float]:
    if dtype == "bool":
        raise InputError(f"input {whole!r}: bool takes no range", "leave the range out")
    ends = text.split("..", 1)
    if len(ends) != 2:
        raise InputError(f"input {whole!r}: {text!r} is not a range low..high", FORM)
    low, high = (_parse_end(end.strip(), dtype, whole) for end in ends)
    if low >= high:
        raise InputError(f"input {whole!r}: the range {text} is empty", "give a low end below the high end (which is exclusive)")
    limits: torch.iinfo | torch.finfo
    if dtype in _INTEGERS:
        limits, last = torch.iinfo(getattr(torch, dtype)), high - 1
    else:
        limits, last = torch.finfo(getattr(torch, dtype)), max(high, high - low)
    if low < limits.min or last > limits.max:
        raise InputError(f"input {whole!r}: the range {text} does not fit {dtype}", f"{dtype} holds {limits.min} to {limits.max}")
    return low, high


def _parse_end(text: str, dtype: str, whole: str) -> float:
    whole_number = dtype in _INTEGERS
    try:
        value = int(text) if whole_number else float(text)
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        kind = "whole number" if whole_number else "number"
        raise InputError(f"input {whole!r}: {text!r} in the range is not a {kind}", FORM)
    return value
