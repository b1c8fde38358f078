"""A site whose TE module does not work on this machine goes on as its twin; everything else is raised as it is."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import EnvironmentLacksError, FallbackWarning
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.fallback import SiteFallback, fallback_words, speaks_of_the_machine
from te_convert.runtime import backend
from te_convert.runtime.probe import TransformerEngineProbe
from tests.replacements import fake_te
from tests.rewrite.rewrite_samples import perturb

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
NO_ALGORITHM = "cublaslt_gemm.cu:431 in function cublas_gemm: Unable to find suitable cuBLAS GEMM algorithm"
SOURCE = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))

def example_inputs():
    return (torch.randn(4, 32),)
"""


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the forward of the fake ``te.Linear`` raise from now on."""
    fake_te.install(monkeypatch)

    def start(error: BaseException) -> None:
        def forward(*_: Any) -> None:
            raise error

        monkeypatch.setattr(fake_te.Linear, "forward", forward)

    return start


def on_twins() -> nn.Module:
    net = perturb(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16)))
    return te_convert.convert(net, (X,), backend="reference", fuse=False).model


def backends(model: nn.Module) -> list[str]:
    return [module.__dict__[SITE_ATTRIBUTE].backend for module in model.modules() if SITE_ATTRIBUTE in module.__dict__]


def test_one_warning_counters_and_the_same_numbers(fails: Callable[..., None]) -> None:
    model = on_twins()
    expected, before = model(X), {name: id(parameter) for name, parameter in model.named_parameters()}
    te_convert.materialize(model)
    torch.testing.assert_close(model(X), expected)
    assert backends(model) == ["te"] * 3
    assert te_convert.fallbacks(model) == []
    fails(RuntimeError(NO_ALGORITHM))
    with pytest.warns(FallbackWarning, match="0 runs on its twin.*suitable cuBLAS") as caught:
        assert torch.equal(model(X), expected)
    assert len(caught) == 1  # though two sites left
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()
    assert backends(model) == ["reference", "te", "reference"]
    found = te_convert.fallbacks(model)
    assert [(site.fqn, site.replacement, site.calls, site.on_twin) for site in found] == [
        ("0", "te.Linear", 2, True),
        ("2", "te.Linear", 2, True),
    ]
    assert all(site.cause == f"RuntimeError: {NO_ALGORITHM}" for site in found)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        AssertionError("GEMM not possible: in_features = 32, but inputmat.shape[-1] = 31"),
        TypeError("forward() got an unexpected keyword argument"),
        ValueError("not enough values to unpack"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered; CUBLAS_STATUS_NOT_SUPPORTED"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED: out of memory"),
        KeyboardInterrupt(),
        MemoryError(),
    ],
)
def test_what_is_not_the_machines_is_raised(
    error: BaseException, fails: Callable[..., None], recwarn: pytest.WarningsRecorder
) -> None:
    model = te_convert.materialize(on_twins())
    fails(error)
    with pytest.raises(type(error)) as caught:
        model(X)
    assert caught.value is error
    assert backends(model) == ["te"] * 3
    assert te_convert.fallbacks(model) == []
    assert not recwarn.list


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("TransformerEngine needs CUDA."),
        RuntimeError("Device compute capability 8.9 or higher required for FP8 execution."),
        RuntimeError("MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."),
        AssertionError("FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."),
        ValueError("No dot product attention backend is available for the provided inputs."),
        RuntimeError("cuBLAS Error: CUBLAS_STATUS_NOT_SUPPORTED"),
        RuntimeError("cuDNN Error: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"),
        RuntimeError("NVRTC library could not be loaded"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        ImportError("/x/flash_attn.so: undefined symbol: _ZN3c10"),
        ModuleNotFoundError("No module named 'triton'"),
        OSError("libcudnn_adv.so.9: cannot open shared object file"),
    ],
)
def test_what_the_machine_lacks(error: BaseException) -> None:
    assert speaks_of_the_machine(error)


def test_te_that_is_demanded_never_falls_back(fails: Callable[..., None]) -> None:
    model = te_convert.materialize(on_twins(), "te")
    fails(RuntimeError(NO_ALGORITHM))
    with pytest.raises(RuntimeError, match="suitable cuBLAS"):
        model(X)
    te_convert.materialize(model)
    te_convert.materialize(model, "te")  # and none is left from before
    with pytest.raises(RuntimeError, match="suitable cuBLAS"):
        model(X)


def test_copies_fall_back_by_themselves(fails: Callable[..., None]) -> None:
    model = te_convert.materialize(on_twins())
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fails(RuntimeError(NO_ALGORITHM))
    for other in others:
        with pytest.warns(FallbackWarning):
            other(X)
        assert backends(other) == ["reference", "te", "reference"]
        assert backends(model) == ["te"] * 3
    keys = list(model.state_dict())
    with pytest.warns(FallbackWarning):
        model(X)
    assert list(model.state_dict()) == keys


def test_a_site_can_go_back_to_te(fails: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = te_convert.materialize(on_twins())
    with monkeypatch.context() as patch:
        patch.setattr(fake_te.Linear, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError(NO_ALGORITHM)))
        with pytest.warns(FallbackWarning):
            expected = model(X)
    te_convert.materialize(model)
    assert backends(model) == ["te"] * 3
    torch.testing.assert_close(model(X), expected)
    assert te_convert.fallbacks(model) == []


def constructors_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("TransformerEngine needs CUDA.")

    monkeypatch.setattr(fake_te, "_device", fails)


def test_constructors_that_fail_leave_the_whole_model_on_twins(fails: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_twins()
    expected = model(X)
    constructors_fail(monkeypatch)
    with pytest.raises(EnvironmentLacksError, match="needs CUDA"):
        te_convert.materialize(model, "te")
    with pytest.warns(FallbackWarning, match="needs CUDA") as caught:
        te_convert.materialize(model)
    assert len(caught) == 1
    assert backends(model) == ["reference"] * 3
    assert torch.equal(model(X), expected)


# ---- directories -------------------------------------------------------------------------------------------------------
@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(SOURCE)
    opened = te_convert.open_model(str(tmp_path / "net.py"))
    result = te_convert.convert(opened.model, opened.example_inputs, backend="reference", fuse=False)
    return te_convert.save(result, tmp_path / "out", source=opened.source)


def test_a_loaded_directory_falls_back_site_by_site(directory: Path, fails: Callable[..., None]) -> None:
    expected = te_convert.load(directory, backend="reference")(X)
    loaded, demanded = te_convert.load(directory), te_convert.load(directory, backend="te")
    assert backends(loaded) == ["te"] * 3
    fails(RuntimeError(NO_ALGORITHM))
    with pytest.warns(FallbackWarning, match="suitable cuBLAS"):
        assert torch.equal(loaded(X), expected)
    with pytest.raises(RuntimeError, match="suitable cuBLAS"):
        demanded(X)


def test_a_directory_loads_on_twins_where_constructors_fail(
    directory: Path, fails: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = te_convert.load(directory, backend="reference")(X)
    constructors_fail(monkeypatch)
    with pytest.warns(FallbackWarning, match="needs CUDA") as caught:
        loaded = te_convert.load(directory)
    assert len(caught) == 1
    assert backends(loaded) == ["reference"] * 3
    assert torch.equal(loaded(X), expected)
    with pytest.raises(EnvironmentLacksError, match="needs CUDA") as demanded:
        te_convert.load(directory, backend="te")
    assert demanded.value.exit_code == 4


def test_a_directory_loads_on_twins_where_te_does_not_import(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU; the model itself stays where it is."""
    broken = TransformerEngineProbe("te.cudnn-missing", "RuntimeError: cudnn shared object not found.")
    real = backend.choose_backend
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "probe_transformer_engine", lambda: broken)
    monkeypatch.setattr("te_convert.emit.load.choose_backend", lambda choice, _: real(choice, "cuda"))
    with pytest.warns(FallbackWarning, match=r"te\.cudnn-missing.*cudnn shared object") as caught:
        loaded = te_convert.load(directory)
    assert len(caught) == 1
    assert backends(loaded) == ["reference"] * 3
    with pytest.raises(EnvironmentLacksError, match=r"te\.cudnn-missing") as demanded:
        te_convert.load(directory, backend="te")
    assert demanded.value.exit_code == 4


def test_words_name_each_cause_once_and_five_sites() -> None:
    many = [SiteFallback(f"layers.{i}", "te.Linear", "RuntimeError: no kernel", 2, on_twin=True) for i in range(7)]
    one = SiteFallback("", "te.LayerNormLinear", "a call that it does not cover", 1, on_twin=False)
    assert fallback_words([*many, one]) == (
        "14 calls of layers.0 (te.Linear), layers.1 (te.Linear), layers.2 (te.Linear), layers.3 (te.Linear), layers.4 (te.Linear), "
        "... did not run on Transformer Engine but on twins: RuntimeError: no kernel",
        "1 call of the root (te.LayerNormLinear) did not run on the replacement: a call that it does not cover",
    )
    assert fallback_words([]) == ()
