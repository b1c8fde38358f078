"""Modules whose forward is Python code written at random: control flow, in-place operations, views, nested arguments, keywords.

A program is a frozen dataclass of plain values, so that the ``repr`` in a failing test's message builds it again.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
_NUMBER = count()

# {a}, {b}: earlier values; {v}: the new one; {m}, {n}: indexes of Linears; {r}: of a norm.  All values are [batch, tokens, WIDTH].
STATEMENTS: dict[str, str] = {
    "linear": "{v} = self.linears[{m}]({a})",
    "norm": "{v} = self.norms[{r}]({a})",
    "norm by keyword": "{v} = self.norms[{r}]({k}={a})",
    "norm and linear": "{v} = self.linears[{m}](self.norms[{r}]({a}))",
    "norm, linear, norm again": "h = self.norms[{r}]({a})\n{v} = self.linears[{m}](h) + h",
    "norm changed in place": "h = self.norms[{r}]({a})\nh += {b}\n{v} = self.linears[{m}](h)",
    "norm changed before it is read": "h = self.norms[{r}]({a})\nh.mul_(0.5)\n{v} = self.linears[{m}](h)",
    "norm as a view": "h = self.norms[{r}]({a})[:, -1:]\n{v} = self.linears[{m}](h).expand_as({a})",
    "residual": "{v} = {a} + self.linears[{m}](self.norms[{r}]({b}))",
    "in place": "{v} = {a}.clone()\n{v} += self.linears[{m}]({b})",
    "item assignment": "{v} = {a}.clone()\n{v}[:, 0] = self.linears[{m}]({b})[:, 0]",
    "mlp": "{v} = self.down(torch.relu(self.up({a})))",
    "norm and mlp": "{v} = {a} + self.mlp(self.norms[{r}]({a}))",
    "gated": "g, u = self.up({a}).chunk(2, dim=-1)\n{v} = torch.sigmoid(g) * u",
    "branch": "if float({a}.detach().mean()) > 0.02:\n    {v} = self.linears[{m}]({a})\nelse:\n    {v} = self.up({b})[..., :16]",
    "branch on the shape": "{v} = self.linears[{m}]({a}) if {a}.shape[1] > 4 else self.norms[{r}]({a})",
    "loop": "{v} = {a}\nfor step in range(2):\n    {v} = {v} + self.linears[{m}](self.norms[{r}]({v})) * (step + 0.5)",
    "loop over modules": "{v} = {a}\nfor linear in self.linears[:2]:\n    {v} = torch.tanh(linear({v}))",
    "flat view": "{v} = self.linears[{m}]({a}.reshape(-1, WIDTH)).view({a}.shape)",
    "transposed": "{v} = self.linears[{m}]({a}.transpose(0, 1)).transpose(0, 1)",
    "tokens apart": "{v} = torch.cat([self.linears[{m}]({a}[:, :1]), self.linears[{n}]({a}[:, 1:])], dim=1)",
    "one by one": "{v} = torch.stack([self.linears[{m}](row) for row in {a}])",
    "heads": "q, k, w = (self.linears[i]({a}).unflatten(-1, (4, 4)).transpose(1, 2) for i in range(3))\n"
    "{v} = F.scaled_dot_product_attention(q, k, w, is_causal={flag}).transpose(1, 2).flatten(-2)",
    "nested arguments": "{v} = self.pair(({a}, {{'key': [{b}]}}), scale=0.5)",
    "no gradient": "with torch.no_grad():\n    h = self.linears[{m}]({a})\n{v} = {b} + h",
    "detached": "{v} = {b} + self.linears[{m}]({a}.detach())",
    "checkpoint": "{v} = checkpoint(lambda t: self.linears[{m}](self.norms[{r}](t)), {a}, use_reentrant=False)",
    "same linear twice": "{v} = self.linears[{m}](torch.tanh(self.linears[{m}]({a})))",
    "functional": "{v} = F.linear({a}, self.linears[{m}].weight)",
    "try": "try:\n    {v} = self.linears[{m}]({a}[..., :3])\nexcept RuntimeError:\n    {v} = self.linears[{n}]({a})",
    "walrus": "{v} = h * 2 if (h := self.linears[{m}]({a})).ndim == 2 else h + 1",
    "lambda": "f = lambda t: self.linears[{m}](t)\n{v} = f(f({a}))",
    "list of results": "many = [linear({a}) for linear in self.linears]\n{v} = sum(many[1:], many[0])",
}
RETURNS = {
    "tensor": "return {a}",
    "tuple": "return {a}, ({b}, [{a}])",
    "dict": "return {{'out': {a}, 'more': {{'hidden': ({b},)}}}}",
    "none inside": "return None, {a}",
    "list": "return [{a}, {b} * 2]",
}


@dataclass(frozen=True)
class Step:
    """A statement and the (first, second) earlier value, Linears and norm that it uses, counted from the end or modulo."""

    name: str
    values: tuple[int, int] = (0, 0)
    modules: tuple[int, int, int] = (0, 0, 0)
    flag: bool = False


@dataclass(frozen=True)
class ProgramForm:
    """Statements, the form of the result, a seed, and whether modules are tied or frozen."""

    steps: tuple[Step, ...]
    returns: str = "tensor"
    norms: tuple[str, ...] = ("layer", "rms")
    tied: bool = False
    frozen: bool = False
    training: bool = False


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


class Pair(nn.Module):
    """Takes a tuple with a dict with a list, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, dict[str, list[Tensor]]], scale: float = 1.0) -> Tensor:
        x, others = both
        y: Tensor = self.proj(self.norm(x)) * scale + others["key"][0]
        return y


class Program(nn.Module):
    """The modules that statements use; subclasses have the forward."""

    def __init__(self, form: ProgramForm) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if kind == "layer" else nn.RMSNorm(WIDTH, eps=1e-6) for kind in form.norms)
        self.up, self.down, self.mlp, self.pair = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), MLP(), Pair()
        if form.tied:
            self.linears[2].weight = self.linears[0].weight
        if form.frozen:
            self.linears[3].requires_grad_(False)
            self.norms[0].requires_grad_(False)


def source(form: ProgramForm) -> str:
    """The forward as Python code."""
    lines, names = ["def forward(self, x, *, extra=None):"], ["x"]

    def name(index: int) -> str:
        return names[-1 - index % len(names)]

    for number, step in enumerate(form.steps):
        text = STATEMENTS[step.name]
        first, second, norm = step.modules
        filled = text.format(
            v=f"v{number}",
            a=name(step.values[0]),
            b=name(step.values[1]),
            m=first % 4,
            n=second % 4,
            r=norm % len(form.norms),
            k="input" if form.norms[norm % len(form.norms)] == "layer" else "x",
            flag=step.flag,
        )
        lines += [f"    {line}" for line in filled.split("\n")]
        names.append(f"v{number}")
    lines.append("    " + RETURNS[form.returns].format(a=name(0), b=name(1)))
    return "\n".join(lines) + "\n"


def build(form: ProgramForm) -> nn.Module:
    """The seeded module, its 1-D parameters moved from their defaults."""
    code, file = source(form), f"<program {next(_NUMBER)}>"
    linecache.cache[file] = (
        len(code),
        None,
        code.splitlines(keepends=True),
        file,
    )  # so that its source can be read, as a user's can
    space: dict[str, Any] = {"__name__": __name__}
    exec("import torch\nimport torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint", space)
    space["WIDTH"] = WIDTH
    exec(compile(code, file, "exec"), space)
    torch.manual_seed(0)
    model: nn.Module = type("Generated", (Program,), {"forward": space["forward"]})(form)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.train(form.training)
