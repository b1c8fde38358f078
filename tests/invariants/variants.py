"""One small block with everything that converts, and the many odd states in which a caller's model can be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, skip_init
from typing_extensions import Self

from tests.rewrite.rewrite_samples import perturb

WIDTH = 32
X = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A norm with three readers, an attention function, a norm with one reader, and plain Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(n), self.k(n), self.v(n)))
        out: Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return out


class HasSlots(Block):
    """torch itself loses what is in slots when it copies a module."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class ComputesAttributes(Block):
    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "factor" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.factor
        return out


class LogsAssignments(Block):
    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("log", []).append(name)
        super().__setattr__(name, value)


class CopiesItself(Block):
    """Its own way to be copied, with random numbers drawn on the way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        new = type(self)()
        new.load_state_dict(self.state_dict())
        return new.train(self.training)


class IsItsOwnCopy(Block):
    def __deepcopy__(self, memo: dict[int, Any]) -> IsItsOwnCopy:
        return self


class SharesAPart(Block):
    """Copies everything but one part, which both then hold."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesAPart:
        memo[id(self.down)] = self.down
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class CannotBeCopied(Block):
    def __deepcopy__(self, memo: dict[int, Any]) -> CannotBeCopied:
        raise RuntimeError("no copies")


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.listed = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.scales = nn.ParameterDict({"gain": nn.Parameter(torch.ones(WIDTH))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.named["proj"](self.named["norm"](x))
        for layer in self.listed:
            x = layer(x)
        out: Tensor = x * self.scales["gain"] + self.shifts[0]
        return out


class ForwardList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = functools.reduce(lambda value, layer: layer(value), self, x)
        return out


class OwnParameter(nn.Parameter):
    """A subclass of Parameter."""


class Packed(torch.Tensor):
    """A tensor that holds its values in another form, as quantised weights do."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.held.clone())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.held if isinstance(value, Packed) else value

        given = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        result = func(*given[0], **given[1])
        return Packed(result) if func is torch.ops.aten.detach.default else result


def block() -> Any:
    """The block in eval mode, with norms and biases moved from their defaults."""
    torch.manual_seed(2)
    return perturb(Block()).eval()


def _of(cls: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(2)
    return perturb(cls()).eval()


def expanded() -> Any:
    model = block()
    model.o.weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
    return model


def non_contiguous() -> Any:
    model = block()
    model.q.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    model.o.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    model.down.weight = nn.Parameter(torch.randn(2 * WIDTH, 64)[::2])
    return model


def slices_of_one() -> Any:
    model = block()
    whole = torch.randn(3 * WIDTH, WIDTH)
    for index, layer in enumerate((model.q, model.k, model.v)):
        layer.weight = nn.Parameter(whole[index * WIDTH : (index + 1) * WIDTH])
    return model


def with_gradients() -> Any:
    model = block()
    model(X).sum().backward()
    return model


def frozen() -> Any:
    model = block()
    for parameter in (model.norm.weight, model.q.weight, model.o.bias, model.up.weight):
        parameter.requires_grad_(False)
    return model


def all_frozen() -> Any:
    return block().requires_grad_(False)


def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return block()


def subclassed_parameter() -> Any:
    model = block()
    model.q.weight = OwnParameter(model.q.weight.data)
    return model


def packed_parameter() -> Any:
    model = block()
    model.o.weight = nn.Parameter(Packed(model.o.weight.data), requires_grad=False)
    return model


def two_names_in_one_module() -> Any:
    model = block()
    model.q.again = model.q.weight
    return model


def two_names_in_two_modules() -> Any:
    model = block()
    model.alias = model.o.weight
    return model


def one_module_twice() -> Any:
    model = block()
    model.k, model.again = model.q, model.norm
    return model


def tied() -> Any:
    model = block()
    model.o.weight = model.v.weight
    return model


def parametrized() -> Any:
    model = block()
    parametrizations.weight_norm(model.q)
    parametrizations.spectral_norm(model.up)
    parametrizations.orthogonal(model.o)
    return model


def old_weight_norm() -> Any:
    model = block()
    nn.utils.weight_norm(model.o)
    return model


def pruned() -> Any:
    model = block()
    prune.l1_unstructured(model.o, "weight", 0.3)
    return model


def skipped_init() -> Any:
    model = block()
    model.o = skip_init(nn.Linear, WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in model.o.parameters():
            parameter.normal_()
    return model


def hooked() -> Any:
    model = block()
    model.q.register_forward_hook(lambda module, args, output: output * 2)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.up.register_full_backward_hook(lambda module, given, taken: None)
    model.down.register_full_backward_pre_hook(lambda module, taken: None)
    return model


def state_dict_hooks() -> Any:
    model = block()
    model.o._register_state_dict_hook(lambda module, state, prefix, metadata: state.update({f"{prefix}note": torch.ones(1)}))
    model._register_load_state_dict_pre_hook(lambda state, *_: state.pop("o.note", None))
    return model


def parameter_hooks() -> Any:
    model = block()
    model.o.weight.register_hook(lambda gradient: gradient * 2)
    model.down.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def buffers() -> Any:
    model = block()
    model.register_buffer("kept", torch.ones(3))
    model.register_buffer("passing", torch.ones(3), persistent=False)
    model.o.register_buffer("mask", torch.ones(2))
    model.norm2.register_buffer("passing", torch.ones(2), persistent=False)
    return model


def registered_nones() -> Any:
    model = block()
    model.register_parameter("nothing", None)
    model.register_buffer("empty", None)
    model.q.register_parameter("nothing", None)
    model.add_module("absent", None)
    return model


def mixed_flags() -> Any:
    model = block().train()
    model.q.eval()
    model.norm2.eval()
    return model


def cycles() -> Any:
    model = block()
    model.__dict__["me"] = model
    model.q.__dict__["holder"] = model
    return model


def forward_of_an_instance() -> Any:
    """A closure: a copy's Linear still reads the weight of the original."""
    model = block()
    model.q.forward = functools.partial(_doubled, model)
    model.q.forward = lambda x: _doubled(model, x)
    return model


def _doubled(model: Any, x: Tensor) -> Tensor:
    return F.linear(x, model.q.weight, model.q.bias) * 2


def forward_of_the_root() -> Any:
    """A closure: a copy of the model runs the original."""
    model = block()
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    return model


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).eval())


def traced_part() -> Any:
    model = block()
    model.q = torch.jit.trace(model.q, X)
    return model


def lazy_part() -> Any:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LazyLinear(8)).eval()


def integer_weights() -> Any:
    model = block()
    model.o.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
    model.o.forward = lambda x: x  # something that runs
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    cls.__name__: functools.partial(_of, cls)
    for cls in (HasSlots, ComputesAttributes, LogsAssignments, CopiesItself, IsItsOwnCopy, SharesAPart, CannotBeCopied, Containers)
}
OTHERS["ForwardList"] = lambda: perturb(ForwardList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])).eval()
