"""What a converted root does so that checkpoints in the original layout can be read and are written.

Needed only where a weight changed its name or layout (GPT-2's transposed Conv1D); elsewhere the files are the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from te_convert.rewrite.carry_over import find_hooks, remove_hook
from te_convert.rewrite.site import forget_layout, get_record, has_transposed, is_converted, tell_layout


class SavePretrained:
    """Stands in for a Transformers model's ``save_pretrained``: writes the original layout, which ``from_pretrained`` expects."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; a state dict that is given is written as it is."""
        from te_convert.rewrite.state import original_state_dict  # it imports the rewrite, which imports this module

        if len(args) < 2:
            kwargs.setdefault("state_dict", original_state_dict(self.model))
        own: Any = type(self.model)
        return own.save_pretrained(self.model, save_directory, *args, **kwargs)


def watch_files(model: nn.Module) -> None:
    """Register the load hooks and wrap ``save_pretrained`` on a converted root, once, if it has a site that needs them."""
    if any(map(has_transposed, model.modules())) and not find_hooks(model._load_state_dict_pre_hooks, tell_layout):
        model.register_load_state_dict_pre_hook(tell_layout)
        hooks: Any = model._load_state_dict_pre_hooks  # an OrderedDict
        for key in find_hooks(hooks, tell_layout):
            hooks.move_to_end(key, last=False)  # before a fusion's hook renames what it looks at
        model.register_load_state_dict_post_hook(forget_layout)
    if any(map(_is_renamed, model.modules())) and callable(getattr(type(model), "save_pretrained", None)):
        model.__dict__.setdefault("save_pretrained", SavePretrained(model))


def unwatch_files(model: nn.Module) -> None:
    """Undo :func:`watch_files` on a root that no longer needs it."""
    if not any(map(has_transposed, model.modules())):
        remove_hook(model._load_state_dict_pre_hooks, tell_layout)
        remove_hook(model._load_state_dict_post_hooks, forget_layout)
    if not any(map(_is_renamed, model.modules())) and isinstance(model.__dict__.get("save_pretrained"), SavePretrained):
        del model.__dict__["save_pretrained"]


def _is_renamed(module: nn.Module) -> bool:
    weights = get_record(module).decision.weights if is_converted(module) else None
    return weights is not None and not weights.keeps_layout
