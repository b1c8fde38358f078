"""Models composed from a description: blocks of norms, attention and MLPs, in the forms in which people write them.

A description is a frozen dataclass of plain values, so that its ``repr`` builds the same model again, in a failing test's message
and in a source file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.facts.activations import ACTIVATIONS

VOCABULARY = 40
NORMS = ("layer", "layer-no-bias", "layer-bare", "layer-own", "rms", "rms-no-eps", "rms-bare", "rms-own", "rms-one-plus")
MODULE_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "silu-inplace": lambda: nn.SiLU(inplace=True),
    "relu": nn.ReLU,
    "relu-inplace": lambda: nn.ReLU(inplace=True),
}
ACTIVATION_NAMES = (*ACTIVATIONS, *(f"module:{name}" for name in MODULE_ACTIVATIONS))


@dataclass(frozen=True)
class NormForm:
    """One of :data:`NORMS`, its eps, and whether it is called by keyword."""

    kind: str = "layer"
    eps: float = 1e-5
    keyword: bool = False


@dataclass(frozen=True)
class MLPForm:
    """``gate``: "none", "separate", "packed" (activated half first) or "swapped" (second).  ``owner``: the MLP is a module."""

    gate: str = "none"
    activation: str = "gelu_tanh"
    bias_in: bool = True
    bias_out: bool = True
    owner: bool = True
    keyword: bool = False


@dataclass(frozen=True)
class AttentionForm:
    """``kv_heads``: of 4; ``mask``: "none", "causal", "bool" or "float" (from the model's caller); ``scale``: None or a number."""

    kv_heads: int = 4
    packed: bool = False
    bias: bool = True
    bias_out: bool = True
    mask: str = "none"
    scale: float | None = None
    repeat: bool = False


@dataclass(frozen=True)
class BlockForm:
    """``placement``: "pre", "post", "parallel" (one norm) or "parallel-two"; ``residual``: "x+f", "f+x", "f+=x" or "add"."""

    norm: NormForm = field(default_factory=NormForm)
    attention: AttentionForm | None = field(default_factory=AttentionForm)
    mlp: MLPForm | None = field(default_factory=MLPForm)
    placement: str = "pre"
    residual: str = "x+f"
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelForm:
    """A stack of blocks.

    Attributes:
        order: the blocks called, by index; a block that appears twice is shared.
        tokens: an embedding first; else the model takes [batch, length, width].
        head: "none", "own", or "tied" to the embedding.
        ties: of weights between the first and the last block: "", "down" (MLP), "proj" (attention), or "norm" (the module).
        frozen: indices, into the list of parameters, of those without gradients.
        hooked: index, into the list of modules, of one with a forward hook; -1 for none.
        output: "tensor", "tuple" or "dict".
    """

    blocks: tuple[BlockForm, ...] = (BlockForm(),)
    order: tuple[int, ...] = (0,)
    width: int = 16
    tokens: bool = False
    final: NormForm | None = None
    head: str = "none"
    ties: str = ""
    frozen: tuple[int, ...] = ()
    hooked: int = -1
    dtype: str = "float32"
    output: str = "tensor"


class OwnNorm(nn.Module):
    """A norm by hand: LayerNorm, RMSNorm as Llama's, or with 1 + weight as Gemma's."""

    def __init__(self, kind: str, width: int, eps: float) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.zeros(width) if kind == "rms-one-plus" else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer-own" else None

    def forward(self, input: Tensor) -> Tensor:
        x = input.float()
        if self.bias is not None:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = 1.0 + self.weight.float() if self.kind == "rms-one-plus" else self.weight.float()
        x = x * weight
        return (x if self.bias is None else x + self.bias.float()).to(input.dtype)


def make_norm(form: NormForm, width: int) -> nn.Module:
    """The norm of a form."""
    if form.kind.startswith("layer") and form.kind != "layer-own":
        return nn.LayerNorm(width, form.eps, elementwise_affine=form.kind != "layer-bare", bias=form.kind == "layer")
    if form.kind in ("rms", "rms-no-eps", "rms-bare"):
        return nn.RMSNorm(width, None if form.kind == "rms-no-eps" else form.eps, elementwise_affine=form.kind != "rms-bare")
    return OwnNorm(form.kind, width, form.eps)


class MLP(nn.Module):
    """Plain or gated."""

    def __init__(self, form: MLPForm, width: int) -> None:
        super().__init__()
        self.form, inner = form, 2 * width
        self.up = nn.Linear(width, 2 * inner if form.gate in ("packed", "swapped") else inner, bias=form.bias_in)
        if form.gate == "separate":
            self.gate = nn.Linear(width, inner, bias=form.bias_in)
        self.down = nn.Linear(inner, width, bias=form.bias_out)
        name = form.activation.removeprefix("module:")
        self.act = MODULE_ACTIVATIONS[name]() if name != form.activation else ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(input=x) if self.form.keyword else self.up(x)
        if self.form.gate == "none":
            h = self.act(h)
        elif self.form.gate == "separate":
            h = self.act(self.gate(x)) * h
        else:
            first, second = h.chunk(2, dim=-1)
            if self.form.gate == "swapped":
                first, second = second, first
            if "inplace" in self.form.activation:
                first = first.clone()
            h = self.act(first) * second
        y: Tensor = self.down(h)
        return y


class Attention(nn.Module):
    """Grouped-query attention with its own call of scaled_dot_product_attention."""

    def __init__(self, form: AttentionForm, width: int, heads: int = 4) -> None:
        super().__init__()
        self.form, self.heads, self.size = form, heads, width // heads
        inner = form.kv_heads * self.size
        self.sizes = (width, inner, inner)
        if form.packed:
            self.qkv = nn.Linear(width, sum(self.sizes), bias=form.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, size, bias=form.bias) for size in self.sizes)
        self.proj = nn.Linear(width, width, bias=form.bias_out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(self.sizes, dim=-1) if self.form.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        if self.form.repeat:
            k, v = (t.repeat_interleave(self.heads // self.form.kv_heads, dim=1) for t in (k, v))
        causal, grouped = self.form.mask == "causal", k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.form.scale, enable_gqa=grouped)
        y: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Block(nn.Module):
    """Attention and MLP, either of which may be missing, around a residual stream."""

    def __init__(self, form: BlockForm, width: int) -> None:
        super().__init__()
        self.form = form
        self.norm1 = make_norm(form.norm, width)
        self.norm2 = make_norm(form.norm, width)
        self.attention = Attention(form.attention, width) if form.attention is not None else None
        mlp = MLP(form.mlp, width) if form.mlp is not None else None
        self.inline = mlp is not None and form.mlp is not None and not form.mlp.owner
        if mlp is not None and self.inline:  # its Linears are the block's own
            self.fc1, self.fc2, self.act = mlp.up, mlp.down, mlp.act
        else:
            self.mlp = mlp
        self.drop = nn.Dropout(form.dropout)

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        name = "x" if isinstance(norm, nn.RMSNorm) else "input"
        y: Tensor = norm(**{name: x}) if self.form.norm.keyword else norm(x)
        return y

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        form = self.form.attention
        assert self.attention is not None
        assert form is not None
        taken = self._mask(x, mask, form.mask)
        y: Tensor = self.drop(self.attention(x, mask=taken) if taken is not None else self.attention(x))
        return y

    def _mask(self, x: Tensor, keep: Tensor | None, kind: str) -> Tensor | None:
        """bool [batch, 1, 1, length], or the same as numbers to add."""
        if keep is None or kind in ("none", "causal"):
            return None
        keep = keep[:, None, None, :]
        return keep if kind == "bool" else torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, -1e4)

    def _feed(self, x: Tensor) -> Tensor:
        if self.inline:
            y: Tensor = self.drop(self.fc2(self.act(self.fc1(x))))
            return y
        assert self.mlp is not None
        fed: Tensor = self.drop(self.mlp(x=x) if self.form.mlp is not None and self.form.mlp.keyword else self.mlp(x))
        return fed

    def _add(self, x: Tensor, f: Tensor) -> Tensor:
        if self.form.residual == "f+=x":
            f = f.clone() if self.form.dropout else f
            f += x
            return f
        if self.form.residual == "add":
            return torch.add(x, f)
        return x + f if self.form.residual == "x+f" else f + x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts: list[Callable[[Tensor], Tensor]] = []
        if self.attention is not None:
            parts.append(lambda h: self._attend(h, mask))
        if self.inline or self.mlp is not None:
            parts.append(self._feed)
        if self.form.placement.startswith("parallel"):
            first = self._norm(self.norm1, x)
            inputs = (first, first if self.form.placement == "parallel" else self._norm(self.norm2, x))
            results = [part(h) for part, h in zip(parts, inputs, strict=False)]
            return self._add(x, results[0] if len(results) == 1 else results[0] + results[1])
        for norm, part in zip((self.norm1, self.norm2), parts, strict=False):
            x = (
                self._norm(norm, self._add(x, part(x)))
                if self.form.placement == "post"
                else self._add(x, part(self._norm(norm, x)))
            )
        return x


class Composed(nn.Module):
    """The stack."""

    def __init__(self, form: ModelForm) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCABULARY, form.width) if form.tokens else None
        self.blocks = nn.ModuleList(Block(block, form.width) for block in form.blocks)
        self.final = make_norm(form.final, form.width) if form.final is not None else None
        self.head = nn.Linear(form.width, VOCABULARY, bias=form.head != "tied") if form.head != "none" else None
        self.register_buffer("scale", torch.full((1,), 1.25))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        scale: Tensor = self.get_buffer("scale")
        h = (self.embed(x) if self.embed is not None else x) * scale
        for index in self.form.order:
            h = self.blocks[index](h, mask=mask)
        if self.final is not None:
            h = self.final(h)
        y: Tensor = self.head(h) if self.head is not None else h
        if self.form.output == "tuple":
            return y, y.mean(1)
        return {"result": y} if self.form.output == "dict" else y


def build(form: ModelForm) -> Composed:
    """The model, with seeded weights and with norms and biases away from their first values; eval mode."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = Composed(form)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    torch.random.set_rng_state(state)
    _tie(model, form)
    parameters = list(model.parameters())
    for index in form.frozen:
        parameters[index % len(parameters)].requires_grad_(False)
    return model.to(getattr(torch, form.dtype)).eval()


def _tie(model: Composed, form: ModelForm) -> None:
    """Ties between embedding and head, and between the first and the last block where both have the part in one shape."""
    if form.head == "tied" and model.embed is not None and model.head is not None:
        model.head.weight = model.embed.weight
    first, last = model.blocks[0], model.blocks[-1]
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    if form.ties == "norm" and first.form.norm == last.form.norm:
        last.norm1 = first.norm1
    if form.ties == "proj" and first.attention is not None and last.attention is not None:
        last.attention.proj.weight = first.attention.proj.weight
    if form.ties == "down" and not (first.inline or last.inline) and first.mlp is not None and last.mlp is not None:
        last.mlp.down.weight = first.mlp.down.weight


def inputs(form: ModelForm, batch: int = 2, length: int = 6, seed: int = 1) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments; the mask, if a block takes one, hides the last two positions of the last sequence."""
    random = torch.Generator().manual_seed(seed)
    if form.tokens:
        x = torch.randint(0, VOCABULARY, (batch, length), generator=random)
    else:
        x = torch.randn(batch, length, form.width, generator=random).to(getattr(torch, form.dtype))
    if not any(block.attention is not None and block.attention.mask in ("bool", "float") for block in form.blocks):
        return (x,), {}
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[-1, -2:] = False
    return (x,), {"mask": mask}
