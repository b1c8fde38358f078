from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.emit.input_spec import InputSpec, parse_input, parse_inputs
from te_convert.errors import InputError


def test_named_and_positional() -> None:
    args, kwargs = parse_inputs(["input_ids:int64[2,128]:0..30522; mask : bool [2, 128]", "float32[2,3]", "x:bfloat16[4]:-1..1.5"])
    ids = kwargs["input_ids"]
    assert (ids.dtype, ids.shape) == (torch.int64, (2, 128))
    assert ids.min() >= 0
    assert 1000 < ids.max() < 30522
    assert (kwargs["mask"].dtype, kwargs["mask"].shape) == (torch.bool, (2, 128))
    assert [(arg.dtype, tuple(arg.shape)) for arg in args] == [(torch.float32, (2, 3))]
    assert kwargs["x"].dtype == torch.bfloat16
    assert kwargs["x"].abs().max() <= 1.5


def test_ranges_are_exclusive_and_reach_both_ends() -> None:
    (values,), _ = parse_inputs(["int8[1000]:-3..2"])
    assert set(values.tolist()) == {-3, -2, -1, 0, 1}
    (default,), _ = parse_inputs(["int32[100]"])
    assert set(default.tolist()) == {0, 1}
    (full,), _ = parse_inputs(["uint8[5000]:0..256"])
    assert full.max() == 255
    (normal,), _ = parse_inputs(["float64[4000]"])
    assert abs(float(normal.std()) - 1) < 0.1
    (uniform,), _ = parse_inputs(["float32[4000]:2..3"])
    assert uniform.min() >= 2
    assert uniform.max() <= 3
    (scalar,), _ = parse_inputs(["float32[]"])
    assert scalar.shape == ()


def test_the_same_texts_give_the_same_tensors_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    first, second = (parse_inputs(["float32[3];int64[3]:0..9"])[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], parse_inputs(["float32[3]"], seed=1)[0][0])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x:float32", "no sizes in brackets"),
        ("x", "no sizes in brackets"),
        ("x:float32[2", "the bracket is not closed"),
        ("x:float32]2[", "the parts are not"),
        ("x:float32[2]3", "the parts are not"),
        ("a:b:float32[2]", "the parts are not"),
        ("x:float33[2]", "'float33' is not a dtype"),
        ("x:[2]", "'' is not a dtype"),
        ("x:float32[a]", "'a' is not a size"),
        ("x:float32[2,]", "'' is not a size"),
        ("x:float32[-1]", "'-1' is not a size"),
        ("x:float32[2.5]", "'2.5' is not a size"),
        ("2x:float32[2]", "'2x' is not an argument name"),
        ("class:float32[2]", "'class' is not an argument name"),
        (":float32[2]", "'' is not an argument name"),
        ("x:int64[2]:5", "'5' is not a range"),
        ("x:int64[2]:", "'' is not a range"),
        ("x:int64[2]:0..", "'' in the range is not a whole number"),
        ("x:int64[2]:0..1.5", "'1.5' in the range is not a whole number"),
        ("x:float32[2]:0..nan", "'nan' in the range is not a number"),
        ("x:float32[2]:0..z", "'z' in the range is not a number"),
        ("x:int64[2]:5..5", "the range 5..5 is empty"),
        ("x:float32[2]:2..1", "the range 2..1 is empty"),
        ("x:int8[2]:0..200", "does not fit int8"),
        ("x:uint8[2]:-1..2", "does not fit uint8"),
        ("x:float16[2]:0..1e9", "does not fit float16"),
        ("x:float64[2]:-1.7e308..1.7e308", "does not fit float64"),
        ("x:bool[2]:0..2", "bool takes no range"),
        ("x:float32[99999999999,99999999999]", "are too many"),
        ("x:float32[2];x:float32[2]", "x is given twice"),
        ("x:int64[2]:0..9223372036854775808", "cannot be made"),
        (" ; ", "no input is described"),
    ],
)
def test_malformed(text: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_inputs([text])
    assert part in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


names = st.none() | st.from_regex(r"[a-z_][a-z0-9_]{0,8}x", fullmatch=True)
sizes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> tuple[str, InputSpec]:
    name, shape = draw(names), draw(sizes)
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"]))
    low: float | None = None
    high: float | None = None
    if dtype != "bool" and draw(st.booleans()):
        if "int" in dtype:
            low = draw(st.integers(0, 100))
            high = draw(st.integers(low + 1, 127))
        else:
            low = draw(st.floats(-100, 100))
            high = draw(st.floats(-100, 100).filter(lambda value: value > low))
    space = draw(st.sampled_from(["", " "]))
    text = f"{name + ':' if name else ''}{dtype}[{(',' + space).join(map(str, shape))}]"
    return text + ("" if low is None else f":{low}{space}..{high}"), InputSpec(name, dtype, shape, low, high)


@settings(max_examples=100, deadline=None)
@given(specs())
def test_what_is_written_is_read(sample: tuple[str, InputSpec]) -> None:
    text, spec = sample
    assert parse_input(text) == spec
    args, kwargs = parse_inputs([text])
    tensor = kwargs[spec.name] if spec.name else args[0]
    assert tuple(tensor.shape) == spec.sizes
    assert tensor.dtype == getattr(torch, spec.dtype)
    if spec.low is not None and spec.high is not None and tensor.numel():
        low = torch.tensor(spec.low).to(tensor.dtype).double()
        assert low - 1 <= tensor.double().min()
        assert math.isfinite(tensor.double().max())
        assert tensor.double().max() <= spec.high + 1


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="x:[],.0123-int64float32bool; ", max_size=24))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with suppress(InputError):
        assert isinstance(parse_input(text), InputSpec)
