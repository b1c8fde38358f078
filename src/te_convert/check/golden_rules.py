"""When a figure counts as worse than a recorded one, and when as better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from te_convert.report.format import format_db, format_error, format_ratio
from te_convert.verify.model import Figures
from te_convert.verify.tolerance import (
    ERROR_RATIO,
    GOLDEN_ENOUGH_DB,
    GOLDEN_ENOUGH_REL,
    GOLDEN_MODEL_REL_FACTOR,
    GOLDEN_MODEL_SLACK_DB,
    GOLDEN_REL_FACTOR,
    GOLDEN_SLACK_DB,
    GRADIENT_REL,
    MAX_REL_FLOAT32,
    SQNR_DB_FLOAT32,
    SQNR_DB_FLOAT64,
)


@dataclass(frozen=True)
class Slack:
    """How much worse than recorded a figure may be.

    Attributes:
        db: by how much an SQNR may be lower; infinite where it is that of the worst of many tensors, so that the relative error
            says it all.
        factor: how many times the recorded relative error.
        bound: the relative error that float32 is allowed.
    """

    db: float
    factor: float
    bound: float = MAX_REL_FLOAT32


SITE = Slack(GOLDEN_SLACK_DB, GOLDEN_REL_FACTOR)
MODEL = Slack(GOLDEN_MODEL_SLACK_DB, GOLDEN_MODEL_REL_FACTOR)
GRADIENTS = Slack(math.inf, GOLDEN_MODEL_REL_FACTOR, GRADIENT_REL)


@dataclass(frozen=True)
class Recorded:
    """The figures of one comparison.

    Attributes:
        dtype: in which both sides ran.
        judged: False for one low-precision run of the whole model, which is a single draw of rounding noise: only that it was made
            is compared.
    """

    sqnr_db: float
    max_rel: float
    error_ratio: float | None
    dtype: str
    judged: bool = True

    @classmethod
    def of(cls, figures: Figures, error_ratio: float | None, dtype: str, judged: bool = True) -> Recorded:
        """What is recorded of a comparison."""
        return cls(figures.sqnr_db, figures.max_rel, error_ratio, dtype, judged)

    @property
    def in_float64(self) -> bool:
        """The figures are of a float64 run, made because float32 missed its bound; float32 alone never comes so close."""
        return self.dtype == "float64" or SQNR_DB_FLOAT64 <= self.sqnr_db < math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, to five digits: more would only make files differ."""
        return {
            "sqnr_db": _rounded(self.sqnr_db),
            "max_rel": _rounded(self.max_rel),
            "error_ratio": None if self.error_ratio is None else _rounded(self.error_ratio),
            "dtype": self.dtype,
            "judged": self.judged,
        }


def find_worse(then: Recorded, now: Recorded, slack: Slack) -> tuple[str, str] | None:
    """The figure that got worse and what it was held against, or None."""
    if not (then.judged and now.judged) or (then.in_float64 and not now.in_float64):
        return None
    if now.in_float64 and not then.in_float64:
        return _missed_float32(then, now, slack)
    if not math.isinf(slack.db) and not now.sqnr_db >= min(then.sqnr_db - slack.db, GOLDEN_ENOUGH_DB):
        return f"SQNR {_db(now)} dB", f"recorded {_db(then)} dB, slack {slack.db:g} dB below {GOLDEN_ENOUGH_DB:g} dB"
    if not now.max_rel <= max(then.max_rel * slack.factor, GOLDEN_ENOUGH_REL):
        allowed = f"slack ×{slack.factor:g} above {GOLDEN_ENOUGH_REL:g}"
        return f"max rel {format_error(now.max_rel)}", f"recorded {format_error(then.max_rel)}, {allowed}"
    if then.error_ratio is None or now.error_ratio is None or now.error_ratio <= max(then.error_ratio, 1.0) * ERROR_RATIO:
        return None
    return f"error ratio {format_ratio(now.error_ratio)}", f"recorded {format_ratio(then.error_ratio)}, slack ×{ERROR_RATIO:g}"


def _missed_float32(then: Recorded, now: Recorded, slack: Slack) -> tuple[str, str] | None:
    """float32 missed its bound (by rounding alone, as float64 shows): worse if a figure within the slack would have held it."""
    held = math.isinf(slack.db) or then.sqnr_db - slack.db >= SQNR_DB_FLOAT32
    if not held or then.max_rel * slack.factor > slack.bound:
        return None
    return f"SQNR {_db(now)} dB, in float64 only", f"recorded {_db(then)} dB in {then.dtype}, which now misses its bound"


def find_better(then: Recorded, now: Recorded, slack: Slack) -> str:
    """What got better by more than the slack, in words, or ""."""
    if not (then.judged and now.judged):
        return ""
    if then.in_float64 and not now.in_float64:
        return f"holds its float32 bound again (SQNR {_db(now)} dB)"
    if not now.in_float64 and then.sqnr_db < GOLDEN_ENOUGH_DB and now.sqnr_db > then.sqnr_db + slack.db:
        return f"SQNR {_db(now)} dB, recorded {_db(then)} dB"
    if then.error_ratio is not None and now.error_ratio is not None and now.error_ratio * ERROR_RATIO < then.error_ratio:
        return f"error ratio {format_ratio(now.error_ratio)}, recorded {format_ratio(then.error_ratio)}"
    return ""


def _db(recorded: Recorded) -> str:
    return format_db(Figures(recorded.sqnr_db, recorded.max_rel, bit_equal=False, numel=0))


def _rounded(value: float) -> float | str:
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
