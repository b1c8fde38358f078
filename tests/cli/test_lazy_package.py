from __future__ import annotations

import pytest

import te_convert
from tests.cli.test_main import python

FAKE = (
    "import sys, types\nimport te_convert\n"
    "fake = types.ModuleType('te_convert.api')\n"
    "fake.verify = lambda *args, **kwargs: ('verified', args, kwargs)\n"
    "fake.convert = lambda: 'converted'\n"
    "sys.modules['te_convert.api'] = fake\n"
)


@pytest.mark.report("NVIDIA/TransformerEngine#1287")
def test_importing_the_package_imports_nothing_heavy() -> None:
    done = python("import sys, te_convert\ndir(te_convert)\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_names_load_on_first_use() -> None:
    done = python(FAKE + "assert te_convert.convert() == 'converted'\nassert te_convert.Plan.__name__ == 'Plan'")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "first", ["", "import te_convert.verify.model as model", "from te_convert.verify.model import Parity", "te_convert.Parity"]
)
def test_verify_is_the_function_and_the_subpackage(first: str) -> None:
    code = FAKE + first + "\nassert te_convert.verify(1, inputs=2) == ('verified', (1,), {'inputs': 2})\n"
    code += "import te_convert.verify.model as again\nassert te_convert.verify.model is again"
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["bench", "explain"])
def test_other_functions_that_are_subpackages(name: str) -> None:
    use = f"assert callable(te_convert.{name}) and te_convert.{name}.__name__ == 'te_convert.{name}'"
    done = python(f"import te_convert\n{use}\nimport te_convert.{name}.model\n{use}")
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        te_convert.nonsense  # noqa: B018
    assert set(te_convert.__all__) <= set(dir(te_convert))
