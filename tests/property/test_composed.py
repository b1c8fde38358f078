"""Properties that every conversion has, on models composed at random.

50 models in CI, the same in every run.  ``make fuzz`` runs 2000 others.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.property.checks import check_conversion
from tests.property.composer import ModelForm
from tests.property.strategies import models

CHECKS = list(HealthCheck)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=CHECKS, phases=PHASES)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=CHECKS, phases=PHASES)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.mark.timeout(0)
@PROFILE
@given(models())
def test_a_conversion_keeps_its_promises(form: ModelForm) -> None:
    with TemporaryDirectory() as directory:
        check_conversion(form, Path(directory))
