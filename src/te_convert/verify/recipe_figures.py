"""What emulating a recipe found, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from te_convert.verify.model import json_number


@dataclass(frozen=True)
class RecipeSite:
    """One converted site whose products the recipe computes.

    Attributes:
        sqnr_db: of its output in the recipe against its own in high precision, on the inputs that it gets; worst of its calls.
        calls: how many were compared.
        flops: of its recorded calls.
        share: its share of the noise at the model's output, estimated; None where nobody asked.
        high: it is to stay in high precision.
        why: the bound that it, or the model with it, missed; "" for a site that keeps the recipe.
    """

    fqn: str
    sqnr_db: float
    calls: int
    flops: int
    share: float | None = None
    high: bool = False
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "sqnr_db": json_number(self.sqnr_db), "share": json_number(self.share)}


@dataclass(frozen=True)
class RecipeScenario:
    """One run of the whole model in the recipe against the original.

    Attributes:
        output: the worst output.
        sqnr_db: with every site in the recipe that can be.
        proposed_sqnr_db: with the sites in high precision that are to stay there.
    """

    name: str
    output: str
    sqnr_db: float
    proposed_sqnr_db: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.__dict__,
            "sqnr_db": json_number(self.sqnr_db),
            "proposed_sqnr_db": json_number(self.proposed_sqnr_db),
        }


@dataclass(frozen=True)
class RecipeFigures:
    """The forward of a model in an emulated recipe.

    Attributes:
        recipe: the one asked for.
        emulated: the one emulated, which differs for "fp8".
        min_sqnr_db: the bound put to the model.
        min_site_sqnr_db: the bound put to each site.
        sites: the sites that the recipe computes, worst first.
        scenarios: the whole model; empty where it could not be judged.
        notes: what limits the figures.
    """

    recipe: str
    emulated: str
    min_sqnr_db: float
    min_site_sqnr_db: float
    sites: tuple[RecipeSite, ...] = ()
    scenarios: tuple[RecipeScenario, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def high(self) -> tuple[RecipeSite, ...]:
        """The sites that are to stay in high precision."""
        return tuple(site for site in self.sites if site.high)

    @property
    def sqnr_db(self) -> float:
        """The model's worst scenario with the proposal; NaN without one."""
        return min((scenario.proposed_sqnr_db for scenario in self.scenarios), default=math.nan)

    @property
    def passed(self) -> bool:
        """True when the model reaches its bound in every scenario with the proposal, and some scenario was judged."""
        return bool(self.scenarios) and self.sqnr_db >= self.min_sqnr_db

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "recipe": self.recipe,
            "emulated": self.emulated,
            "min_sqnr_db": self.min_sqnr_db,
            "min_site_sqnr_db": self.min_site_sqnr_db,
            "sqnr_db": json_number(self.sqnr_db),
            "passed": self.passed,
            "scenarios": [scenario.to_dict() for scenario in self.scenarios],
            "sites": [site.to_dict() for site in self.sites],
            "notes": list(self.notes),
        }
