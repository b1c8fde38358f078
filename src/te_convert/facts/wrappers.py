"""Wrappers for training that hold on to the Parameters or the code of a model, so that it has to be converted before them.

Classes are told by name: importing torch's distributed packages takes longer than a small conversion.
"""

from __future__ import annotations

from torch import Tensor, nn

_AGAIN = {
    "OptimizedModule": ("is wrapped by torch.compile", "convert {inner}, then compile the result", "_orig_mod"),
    "DistributedDataParallel": (
        "is wrapped by DistributedDataParallel, which synchronises the gradients of the Parameters that it was given",
        "convert {inner}, then wrap the result",
        "module",
    ),
    "DataParallel": (
        "is wrapped by DataParallel, whose replicas would share the fused modules of one device",
        "convert {inner}, then wrap the result in DistributedDataParallel",
        "module",
    ),
    "FullyShardedDataParallel": (
        "is wrapped by FullyShardedDataParallel, which flattened its Parameters",
        "convert the model first and shard the result; FSDP2 (fully_shard) is tested",
        "module",
    ),
}
"""Class name → what is the matter, what to do, the attribute that holds the model."""


def is_sharded(tensor: Tensor | None) -> bool:
    """True for a DTensor, of which this process holds a part."""
    return tensor is not None and type(tensor).__name__ == "DTensor"


def find_wrapper(model: nn.Module) -> tuple[str, str] | None:
    """Why a model cannot be converted as it is wrapped or sharded now, and what to do; None when it can."""
    for fqn, module in model.named_modules():
        cls = next((c for c in type(module).__mro__ if c.__name__ in _AGAIN and c.__module__.startswith("torch.")), None)
        where = f"model.{fqn}" if fqn else "model"
        if cls is not None:
            problem, hint, attribute = _AGAIN[cls.__name__]
            return f"the {where.replace('.', ' part ', 1)} {problem}", hint.format(inner=f"{where}.{attribute}")
        sharded = next((name for name, parameter in module._parameters.items() if is_sharded(parameter)), None)
        if sharded is not None:
            what = f"the model is sharded: {fqn}{'.' if fqn else ''}{sharded} is a DTensor"
            return what, "convert the model before fully_shard or distribute_module, then shard the result"
    return None
