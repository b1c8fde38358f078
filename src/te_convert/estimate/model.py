"""The estimate as plain data: what one step takes in the original, on TE, and on TE in each recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from te_convert.estimate.cost import Times

ESTIMATE_SCHEMA = 1
BF16 = "bf16"
PREDICTED = "figures are predicted by a roofline model, not measured; docs/estimate.md has its error on published measurements"


@dataclass(frozen=True)
class SiteEstimate:
    """One place in one recipe, all its calls of a step together.

    Attributes:
        share: "linear", "experts", "attention", "norm" or "other".
        high: it does not run in the recipe: the plan keeps it in high precision, it has no products, or they are not aligned.
        speedup: of the step's time here, over TE in high precision: below 1 the recipe loses.
    """

    fqn: str
    kind: str
    share: str
    flops: float
    original: Times
    te: Times
    recipe: Times
    high: bool
    speedup: float

    @property
    def loses(self) -> bool:
        """The recipe is predicted to be slower here than high precision."""
        return not self.high and self.speedup < 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = {name: getattr(self, name).to_dict() for name in ("original", "te", "recipe")}
        rest = {name: getattr(self, name) for name in ("fqn", "kind", "share", "flops", "high", "loses")}
        return {**rest, "speedup": round(self.speedup, 3), **times}


@dataclass(frozen=True)
class RecipeEstimate:
    """One recipe on one GPU.

    Attributes:
        recipe: "bf16" for TE in high precision.
        unavailable: why the GPU cannot run it, "" when it can; then there are no figures.
        times: of the whole step.
        gated: of the whole step when the sites that lose stay in high precision.
        speedup: over the eager original in bfloat16.
        gated_speedup: the same with ``gated``.
        sites: one entry per place.
        weight_bytes: what TE holds beside the weights: their copies in the recipe's format.
        activation_bytes: change of what TE's products save for the backward; negative when it is less.
    """

    recipe: str
    unavailable: str = ""
    times: Times = field(default_factory=Times)
    gated: Times = field(default_factory=Times)
    speedup: float = 1.0
    gated_speedup: float = 1.0
    sites: tuple[SiteEstimate, ...] = ()
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def losing(self) -> tuple[SiteEstimate, ...]:
        """Sites at which the recipe is predicted to be slower than high precision."""
        return tuple(site for site in self.sites if site.loses)

    @property
    def winning(self) -> tuple[SiteEstimate, ...]:
        """Sites that run in the recipe and are not predicted to lose."""
        return tuple(site for site in self.sites if not site.high and not site.loses)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.unavailable:
            return {"recipe": self.recipe, "unavailable": self.unavailable}
        return {
            "recipe": self.recipe,
            "unavailable": "",
            "speedup": round(self.speedup, 3),
            "gated_speedup": round(self.gated_speedup, 3),
            "times": self.times.to_dict(),
            "gated": self.gated.to_dict(),
            "weight_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "sites": [site.to_dict() for site in self.sites],
        }


@dataclass(frozen=True)
class Verdict:
    """What to do, with a stable code.

    Attributes:
        code: "convert", "only-these-sites", "stay-in-bf16", "not-worth-it", "recipe-unavailable" or "nothing-to-convert".
        recipe: the one to take, or None.
    """

    code: str
    text: str
    recipe: str | None = None


@dataclass(frozen=True)
class Estimate:
    """The prediction for a model.

    Attributes:
        gpu: name in the table.
        mode: "training" or "inference".
        tokens: rows of the products that have most of the FLOPs.
        original: the eager original's step in bfloat16, without the optimizer.
        recipes: TE in high precision first, then those asked for.
        flop_shares: part of the original's FLOPs by kind of site.
        whole: the element-wise work between the sites is known and included.
        notes: what the figures rest on.
    """

    gpu: str
    mode: str
    tokens: int
    original: Times
    recipes: tuple[RecipeEstimate, ...]
    flop_shares: dict[str, float]
    verdict: Verdict
    whole: bool = True
    notes: tuple[str, ...] = ()

    def recipe(self, name: str) -> RecipeEstimate:
        """The figures of one recipe.

        Raises:
            KeyError: it was not asked for.
        """
        for estimate in self.recipes:
            if estimate.recipe == name:
                return estimate
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{self.verdict.code}: {self.verdict.text}", f"{self.gpu}, {self.mode}, {self.tokens} tokens; predicted:"]
        for each in self.recipes:
            speed = each.unavailable or f"{each.speedup:.2f}x of eager bf16"
            lines.append(f"  {each.recipe:12} {speed}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with ``"schema"``."""
        return {
            "schema": ESTIMATE_SCHEMA,
            "gpu": self.gpu,
            "mode": self.mode,
            "tokens": self.tokens,
            "whole": self.whole,
            "predicted": True,
            "verdict": dict(self.verdict.__dict__),
            "original": self.original.to_dict(),
            "flop_shares": {name: round(share, 4) for name, share in self.flop_shares.items()},
            "recipes": [each.to_dict() for each in self.recipes],
            "notes": list(self.notes),
        }
