"""Wrong arguments of the public functions: a typed error of one line that says what was given and what to pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.errors import InputError, LoadError, TeConvertError
from tests.invariants.variants import WIDTH, Block, X, block

api: Any = te_convert
NET = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


class Calls(nn.Module):
    """Its forward does what it was given to do."""

    def __init__(self, action: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.action = nn.Linear(WIDTH, WIDTH), action

    def forward(self, x: Tensor) -> Any:
        return self.action(self.proj(x))


def throw(error: BaseException) -> Any:
    raise error


def forever(x: Tensor) -> Any:
    return forever(x)


def runs(action: Callable[[Tensor], Any]) -> Callable[[], Any]:
    model = Calls(action)
    return lambda: api.convert(model, (X,))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # what is converted
    "no model": (lambda: api.convert(None), "convert takes an nn.Module, got NoneType"),
    "a string": (lambda: api.convert("gpt2"), "got str"),
    "a class": (lambda: api.convert(Block), "got the class Block"),
    "a function": (lambda: api.convert(block), "got function"),
    "a state dict": (lambda: api.convert(NET.state_dict()), "got OrderedDict"),
    "a list of models": (lambda: api.convert([NET]), "got list"),
    "analyze None": (lambda: api.analyze(None), "analyze takes an nn.Module, got NoneType"),
    # what it is run on
    "an array": (lambda: api.convert(NET, X.numpy()), "example_inputs has a ndarray"),
    "arrays": (lambda: api.convert(NET, (X.numpy(),)), "must be Tensor, not numpy.ndarray"),
    "text": (lambda: api.convert(NET, "hello"), "example_inputs has a str"),
    "text in a tuple": (lambda: api.convert(NET, ("hello",)), "must be Tensor, not str"),
    "a number": (lambda: api.convert(NET, 3), "example_inputs has a int"),
    "a generator": (lambda: api.convert(NET, (x for x in (X,))), "example_inputs has a generator"),
    "a set": (lambda: api.convert(NET, {X}), "example_inputs has a set"),
    "a model": (lambda: api.convert(NET, NET), "example_inputs has a Sequential"),
    "a mixed list": (lambda: api.convert(NET, [(X,), "y"]), "example_inputs has a str"),
    "a dict of numbers": (lambda: api.convert(NET, [(X,), {1: X}]), "keyword that is not a string: 1"),
    "an empty list": (lambda: api.convert(NET, []), "empty list"),
    "no arguments": (lambda: api.convert(NET, ()), "missing 1 required positional argument"),
    "too many": (lambda: api.convert(NET, (X, X)), "takes 2 positional arguments but 3 were given"),
    "another name": (lambda: api.convert(NET, {"pixels": X}), "unexpected keyword argument 'pixels'"),
    "another width": (lambda: api.convert(NET, (X[..., 1:],)), "normalized_shape"),
    "another dtype": (lambda: api.convert(NET, (X.double(),)), "dtype"),
    "no data": (lambda: api.convert(NET, (X.to("meta"),)), "meta"),
    # what its forward does
    "it raises": (runs(lambda x: throw(ValueError("my\nown"))), "ValueError: my own"),
    "it exits": (runs(lambda x: sys.exit(3)), r"the model's own code called sys.exit(3)"),
    "it never returns": (runs(forever), "RecursionError"),
    "no memory": (runs(lambda x: throw(MemoryError())), "MemoryError"),
    "a huge tensor": (runs(lambda x: torch.empty(1 << 60)), "memory"),
    "an empty iterator": (runs(lambda x: next(iter(()))), "StopIteration"),
    "no forward": (lambda: api.convert(nn.ModuleList([NET]), (X,)), 'missing the required "forward" function'),
    # options
    "recipe 8": (lambda: api.convert(NET, (X,), recipe=8), "unknown recipe 8"),
    "recipes": (lambda: api.convert(NET, (X,), recipe=["fp8"]), "unknown recipe ['fp8']"),
    "upper case": (lambda: api.convert(NET, (X,), recipe="FP8"), "unknown recipe 'FP8'"),
    "backend": (lambda: api.convert(NET, (X,), backend=None), "unknown backend None"),
    "include": (lambda: api.convert(NET, (X,), include=3), "include takes strings, got 3"),
    "exclude": (lambda: api.convert(NET, (X,), exclude=None), "exclude takes strings, got None"),
    "allow": (lambda: api.convert(NET, (X,), allow=(1,)), "allow takes strings, got 1"),
    "fuse": (lambda: api.convert(NET, (X,), fuse="no"), "fuse is True or False, got 'no'"),
    "strict": (lambda: api.convert(NET, (X,), strict=1), "strict is True or False, got 1"),
    "progress": (lambda: api.convert(NET, (X,), progress=True), "progress is a function, got True"),
    "min_sqnr": (lambda: api.convert(NET, (X,), min_sqnr="20"), "finite number of dB, got '20'"),
    # the other functions
    "verify a string": (lambda: api.verify("a", NET, (X,)), "verify takes an nn.Module, got str"),
    "verify with None": (lambda: api.verify(NET, None, (X,)), "verify takes an nn.Module, got NoneType"),
    "negative steps": (lambda: api.verify(NET, NET, (X,), steps=-1), "number of steps, got -1"),
    "steps of text": (lambda: api.verify(NET, NET, (X,), steps="2"), "number of steps, got '2'"),
    "load nothing": (lambda: api.load(None), "load takes a path, got NoneType"),
    "load a file": (lambda: api.load(__file__), "is not a directory"),
    "load elsewhere": (lambda: api.load("no such folder"), "does not exist"),
    "save a model": (lambda: api.save(NET, "out"), "save takes the result of convert(), got Sequential"),
    "save nowhere": (lambda: api.save(api.convert(NET, (X,)), None), "save takes a path, got NoneType"),
    "open nothing": (lambda: api.open_model(None), "open_model takes a path, got NoneType"),
    "open a path": (lambda: api.open_model(Path("nowhere.py")), "nowhere.py does not exist"),
    "revert": (lambda: api.revert("x"), "revert takes an nn.Module, got str"),
    "state": (lambda: api.original_state_dict(None), "original_state_dict takes an nn.Module, got NoneType"),
    "te state": (lambda: api.te_state_dict(None), "te_state_dict takes an nn.Module, got NoneType"),
    "load state": (lambda: api.load_original_state_dict(NET, "w.safetensors"), "takes a state dict, got str"),
    "autocast": (lambda: api.autocast(None), "autocast takes an nn.Module, got NoneType"),
    "materialize": (lambda: api.materialize(NET, "gpu"), "unknown backend 'gpu'"),
    "optimizer": (lambda: api.remap_optimizer(NET, None), "takes a torch optimizer and the result of convert()"),
    "inputs": (lambda: api.api.parse_inputs([3]), "described by strings"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_a_hint(name: str) -> None:
    call, text = CASES[name]
    random = torch.get_rng_state()
    with pytest.raises(TeConvertError) as caught:
        call()
    assert isinstance(caught.value, InputError | LoadError)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.hint or name == "optimizer"
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("inputs", [(X,), None])
def test_an_interrupt_in_the_forward_passes_through(error: type[BaseException], inputs: Any) -> None:
    with pytest.raises(error):
        te_convert.convert(Calls(lambda x: throw(error())), inputs)


@pytest.mark.parametrize("answer", [None, 3, "text", np.zeros(2)])
def test_a_forward_without_tensors_is_not_called_verified(answer: Any) -> None:
    result = te_convert.convert(Calls(lambda x: answer), (X,))
    assert result.report.parity.status == "sites-only"
    assert any("returned no tensor" in note for note in result.report.notes)


def test_a_scenario_that_fails_is_named() -> None:
    result = te_convert.convert(NET, [(X,), (X[..., 1:],)])
    assert result.converted
    assert any("inputs[1]" in note and "normalized_shape" in note for note in result.report.notes)
