"""The catalogue of the mutation suite: mistakes that a conversion could make, each planted into a converted site of a real model.

Each theme adds its kinds when it is imported; tests/verify/mutant_tools.py says what a kind is.
"""

from __future__ import annotations

from tests.verify import mutants_of_attention, mutants_of_modules, mutants_of_results, mutants_of_weights
from tests.verify.mutant_tools import KINDS, Kind, Place

THEMES = (mutants_of_weights, mutants_of_modules, mutants_of_attention, mutants_of_results)

__all__ = ["KINDS", "THEMES", "Kind", "Place"]
