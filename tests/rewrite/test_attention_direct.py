"""Modules that call torch's scaled_dot_product_attention in their own forward."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import te_convert
from tests.rewrite.test_attention import attention_sites, convert, records

functional_attention = F.scaled_dot_product_attention


class Attention(nn.Module):
    """nanoGPT's, with every option of the function."""

    def __init__(self, groups: int = 4, causal: bool = True, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.groups, self.causal, self.dropout, self.scale = groups, causal, dropout, scale
        self.query, self.pair, self.proj = nn.Linear(32, 32), nn.Linear(32, 2 * groups * 8), nn.Linear(32, 32)

    def heads(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.pair(x if context is None else context).unflatten(-1, (2 * self.groups, 8)).transpose(1, 2).chunk(2, 1)
        return q, k, v

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x, context)
        heads = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=self.groups != 4,
        )
        y: Tensor = self.proj(heads.transpose(1, 2).flatten(-2))
        return y


class TorchAttribute(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x, None)
        y: Tensor = self.proj(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return y


def helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y: Tensor = F.scaled_dot_product_attention(q, k, v)
    return y


class ThroughHelper(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.proj(helper(*self.heads(x, None)).transpose(1, 2).flatten(-2))
        return y


class ThroughMethod(Attention):
    """A method has the function's name (LitGPT)."""

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = F.scaled_dot_product_attention(q, k, v)
        return y

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.proj(self.scaled_dot_product_attention(*self.heads(x, None)).transpose(1, 2).flatten(-2))
        return y


class Wrapped(Attention):
    @functools.wraps(Attention.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(*args, **kwargs)


class HelperAround(Attention):
    """Its helper's call and that of the module inside it could not be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(causal=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.proj(helper(*self.heads(self.inner(x), None)).transpose(1, 2).flatten(-2))
        return y


class Windows(Attention):
    """Queries [b, windows, h, s, d], as timm's NesT and Twins have them; a mask for all, for each window, or for each sample."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        windows = 2 - x.shape[1] % 2
        apart = x.unflatten(1, (windows, -1)).flatten(0, 1)
        q, k, v = (part.unflatten(0, (-1, windows)) for part in self.heads(apart, context))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        y: Tensor = self.proj(heads.flatten(0, 1).transpose(1, 2).flatten(-2)).unflatten(0, (-1, windows)).flatten(1, 2)
        return y


class OneHead(Attention):
    """Queries [b, s, d]."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        k, v = self.pair(x if context is None else context).chunk(2, -1)
        y: Tensor = self.proj(F.scaled_dot_product_attention(self.query(x), k, v, mask, 0.0, self.causal and mask is None))
        return y


class Twice(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x, None)
        heads = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, v, k)
        y: Tensor = self.proj(heads.transpose(1, 2).flatten(-2))
        return y


class Nested(nn.Module):
    """One attention module inside another's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Attention(causal=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x).unflatten(-1, (4, 8)).transpose(1, 2)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(-2))
        return y


def model(attention: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), attention).eval()


def x(length: int = 7) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "make",
    [
        Attention,
        lambda: Attention(causal=False),
        lambda: Attention(groups=2),
        lambda: Attention(scale=0.9),
        TorchAttribute,
        Nested,
        Windows,
        lambda: Windows(causal=False),
        OneHead,
        ThroughHelper,
        ThroughMethod,
        Wrapped,
    ],
)
def test_converted_and_equal(make: Any) -> None:
    original = model(make())
    converted, report = convert(original, x())
    assert report.parity.passed
    assert attention_sites(report)
    for site in attention_sites(report):
        assert (str(site.outcome), site.replacement, site.fallbacks) == ("CONVERTED", "te.DotProductAttention", 0)
        assert site.executed > 0
    with torch.no_grad():
        torch.testing.assert_close(converted(x()), original(x()), rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Windows, (4, 4)),
        (Windows, (1, 2, 1, 4, 4)),
        (Windows, (2, 1, 1, 4, 4)),
        (Windows, (1, 1, 4, 4, 4)),
        (Windows, (4, 4, 4)),
        (OneHead, (8, 8)),
        (OneHead, (2, 8, 8)),
        (OneHead, (1, 8, 8)),
    ],
)
def test_masks_of_other_leading_dimensions(make: Any, shape: tuple[int, ...]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(32, 32), make(causal=False)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.attention(self.first(x), None, mask)
            return y

    torch.manual_seed(0)
    net, mask = Model().eval(), torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[..., 0] = True
    for given in (mask, torch.zeros(shape).masked_fill(~mask, float("-inf")), torch.randn(shape)):
        result = te_convert.convert(net, (x(8), given))
        assert result.report.parity.passed
        assert not result.report.parity.reverted
        (record,) = records(result.model)
        record.executed = record.fallbacks = 0
        with torch.no_grad():
            assert torch.allclose(result.model(x(8), given), net(x(8), given), atol=1e-5)
        assert (record.executed, record.fallbacks) == (1, 0)


def test_what_calls_it_twice_is_refused() -> None:
    converted, report = convert(model(Twice()), x())
    assert [[reason.code for reason in site.reasons] for site in attention_sites(report)] == [["attention.not-switchable"]]
    assert not records(converted)


def test_calls_of_a_helper_and_of_a_module_inside_are_not_mixed_up() -> None:
    converted, report = convert(model(HelperAround()), x())
    outer, inner = sorted(attention_sites(report), key=lambda site: site.fqn)
    (why,) = outer.reasons
    assert why.code == "attention.not-switchable"
    assert "1.inner inside it" in why.detail
    assert str(inner.outcome) == "CONVERTED"
    assert [record.decision.scope for record in records(converted)] == ["1.inner"]


@pytest.mark.parametrize("make", [Attention, ThroughHelper])
def test_gradients_checkpoints_and_copies(make: Any) -> None:
    original = model(make())
    converted = copy.deepcopy(convert(original, x())[0])
    for each in (original, converted):
        torch.utils.checkpoint.checkpoint(each, x(), use_reentrant=False).square().sum().backward()
    reverted: Any = te_convert.revert(converted)
    for (name, theirs), (_, ours) in zip(original.named_parameters(), reverted.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (3, 7), (7, 3)])
def test_causality_starts_in_the_top_left_corner(queries: int, keys: int) -> None:
    original = Attention().eval()
    converted, _ = convert(original, x())
    with torch.no_grad():
        ours, expected = converted(x(queries), x(keys)), original(x(queries), x(keys))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert [record.executed for record in records(converted)] == [int(queries <= keys)]


def test_dropout_in_training_is_checked_per_call() -> None:
    original = Attention(dropout=0.5).eval()
    converted, report = convert(original, x())
    assert report.parity.passed
    converted.train()
    assert not torch.equal(converted(x()), converted(x()))
    converted.dropout = 0.2
    converted(x())
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(2, 1)]


def test_revert_gives_the_class_back() -> None:
    original = model(Attention())
    before = original(x())
    converted, _ = convert(original, x(), inplace=True)
    assert isinstance(converted[1], Attention)
    assert type(converted[1]) is not Attention
    te_convert.revert(converted)
    assert type(converted[1]) is Attention
    assert set(converted[1].__dict__) == set(Attention().__dict__)
    assert torch.equal(converted(x()), before)


def test_copies_and_pickles() -> None:
    converted, _ = convert(model(Attention()), x())
    expected, file = converted(x()), io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    for other in (copy.deepcopy(converted), torch.load(file, weights_only=False)):
        assert torch.equal(other(x()), expected)
        assert [(record.executed, record.fallbacks) for record in records(other)] == [(1, 0)]
        assert type(te_convert.revert(other)[1]) is Attention  # type: ignore[index]
    assert records(converted)


def test_gradients() -> None:
    original = model(Attention())
    converted, _ = convert(original, x())
    original(x()).square().sum().backward()
    converted(x()).square().sum().backward()
    reverted: Any = te_convert.revert(converted)
    for (name, theirs), (_, ours) in zip(original.named_parameters(), reverted.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_other_code_is_not_touched() -> None:
    convert(model(Attention()), x())
    assert F.scaled_dot_product_attention is functional_attention
    assert torch.nn.functional is F


def test_compile_takes_the_original_path() -> None:
    converted, _ = convert(Attention().eval(), x(), exclude=("query", "pair", "proj"))
    compiled: Any = torch.compile(converted, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x()), converted(x()), rtol=1e-4, atol=1e-5)
    assert [record.executed for record in records(converted)] == [1]


def test_timm() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 4, "embed_dim": 32, "num_heads": 4}
    original = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    images = torch.randn(2, 3, 32, 32)
    converted, report = convert(original, images)
    assert report.parity.passed
    assert all(str(site.outcome) in ("CONVERTED", "FUSED") for site in attention_sites(report))
    with torch.no_grad():
        torch.testing.assert_close(converted(images), original(images), rtol=1e-4, atol=1e-5)
