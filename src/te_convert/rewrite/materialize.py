"""From twins to TE modules and back, in a live model: every module object stays, and becomes one of the other backend.

Parameters are the same objects before and after, so optimisers, ties and what members of fusions borrow need no care.  What a
constructor makes is taken from a new module of the same spec, whose own parameters are on meta; everything else stays.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from te_convert.capture.ambient import plain_modes
from te_convert.capture.arguments import require_module
from te_convert.capture.tensors import model_device
from te_convert.config import ConvertConfig
from te_convert.errors import EnvironmentLacksError
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.carry_over import carry_attributes
from te_convert.rewrite.fallback import unwatch, watch
from te_convert.rewrite.fused import FusedRecord
from te_convert.rewrite.nested import PLACE
from te_convert.rewrite.portable import build_converted, is_tes
from te_convert.rewrite.site import is_converted, site_class
from te_convert.runtime.backend import Backend, choose_backend, warn_missed

_OF_EVERY_MODULE = nn.Module().__dict__.keys()
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


@plain_modes()
def materialize(model: nn.Module, backend: str = "auto") -> nn.Module:
    """Switch a live converted model between the twins and Transformer Engine, in place and without copying a weight.

    Module and Parameter objects stay the same, so hooks, ties and an optimizer's state go on.  Convert on any machine, move the
    model to a GPU with ``.to("cuda")``, then materialize it there.

    Args:
        model: a converted model; where nothing of it was converted, nothing is done.
        backend: "te", "reference", or "auto" for TE where it can run on the model's device; a site whose TE module turns out not to
            work there then goes on as its twin, with a warning (:func:`te_convert.fallbacks`).

    Returns:
        ``model``.

    Raises:
        InputError: not a module, or an unknown backend.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run, or is too old; the model is as it was.
    """
    require_module(model, "materialize", "pass the converted model")
    config = ConvertConfig(backend=backend)
    chosen = choose_backend(config.backend, model_device(model).type)
    unwatch(model)
    try:
        switch_backend(model, chosen.name)
    except EnvironmentLacksError as error:
        if config.backend != "auto":
            raise
        chosen = Backend("reference", str(error), missed=str(error))
    except Exception as error:  # whatever TE's constructors raise; nothing was changed
        why = f"Transformer Engine does not build the modules: {type(error).__name__}: {error}"
        if config.backend != "auto":
            raise EnvironmentLacksError(why, "run te-convert doctor") from error
        chosen = Backend("reference", why, missed=why)
    if config.backend == "auto":
        allow_fallback(model, chosen)
    return model


def allow_fallback(model: nn.Module, chosen: Backend) -> None:
    """What ``backend="auto"`` means on a GPU: say why the model is not on TE, and let single sites leave TE where they must."""
    warn_missed(chosen)
    if chosen.name == "te":
        watch(model, switch_modules)


def switch_backend(model: nn.Module, backend: str) -> int:
    """Make every converted module of a model one of ``backend``, "te" or "reference"; all of them or, on an exception, none.

    Returns:
        How many modules were of the other backend.

    Raises:
        EnvironmentLacksError: Transformer Engine does not import, or is too old for one of them.
    """
    return switch_modules([module for module in model.modules() if is_converted(module)], backend)


def switch_modules(found: list[nn.Module], backend: str) -> int:
    """:func:`switch_backend` for these converted modules alone."""
    modules: list[Any] = [module for module in found if module.__dict__[SITE_ATTRIBUTE].backend != backend]
    made = [(module, *_before_and_after(module, backend)) for module in modules]
    for module, old, new in made:
        rebuild(module, old, new)
        module.__dict__[SITE_ATTRIBUTE].backend = backend
    return len(made)


def rebuild(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Make a converted module, constructed as ``old`` was, one that was constructed as ``new`` was; parameters stay."""
    _become(module, old, new)
    record: Any = module.__dict__[SITE_ATTRIBUTE]
    if isinstance(record, FusedRecord):
        record.own_children = tuple(new._modules)
        originals = record.role("owner")
    else:
        originals = [record.original]
    for original in originals:
        carry_attributes(original, module)
    for name, part in module.named_modules():
        if PLACE in part.__dict__ and name in dict(new.named_modules()):
            part.__dict__[PLACE] = (module, name)
            part.training = module.training


def _before_and_after(module: nn.Module, backend: str) -> tuple[nn.Module, nn.Module]:
    """What the constructors of the backend that a module has, and of the one that it gets, make."""
    record: Any = module.__dict__[SITE_ATTRIBUTE]
    classes: Any = ((type(module), record.backend), (site_class(record.decision.spec, backend), backend))
    old, new = (build_converted(cls, record.decision, name, record.parallel) for cls, name in classes)
    return old, new


def _become(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Exchange what ``old`` has from its constructor by what ``new`` has, but for parameters and for children of the same name."""
    own = module.__dict__
    for name in old.__dict__.keys() - _OF_EVERY_MODULE:
        own.pop(name, None)
    own.update({name: value for name, value in new.__dict__.items() if name not in _OF_EVERY_MODULE})
    for name in _LOAD_HOOKS:
        added = new.__dict__[name]
        if added or any(map(is_tes, own[name].values())):
            kept = {key: hook for key, hook in own[name].items() if not is_tes(hook)}
            own[name] = OrderedDict({**kept, **added})
    foreign = {name: value for name, value in own["_parameters"].items() if name not in old._parameters}
    parameters = {name: own["_parameters"].get(name, value) for name, value in new._parameters.items()}
    own["_parameters"].clear()
    own["_parameters"].update({**parameters, **foreign})
    _exchange_children(own["_modules"], old._modules, new._modules)
    module.__class__ = new.__class__


def _exchange_children(children: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    """In place: an owner's dictionary of children is that of the module which took its place."""
    others = {name: child for name, child in children.items() if name not in old}
    kept: dict[str, Any] = {}
    for name, child in new.items():
        kept[name] = child
        if old.get(name) is not None and child is not None:
            kept[name] = children[name]
            _become(children[name], old[name], child)
    children.clear()
    children.update({**kept, **others})
