"""The ranks among which a model is to be divided: a DeviceMesh, checked once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_convert.errors import InputError


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model.

    Attributes:
        group: their process group.
        size: their number.
        rank: this process among them.
    """

    group: Any
    size: int
    rank: int

    def all_of(self, value: Any) -> list[Any]:
        """What each rank says, in their order; all have to ask."""
        said: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(said, value, group=self.group)
        return said


def find_ranks(mesh: Any, device_type: str) -> Ranks:
    """The ranks of a one-dimensional mesh.

    Args:
        mesh: what the caller passed as ``tp_mesh``.
        device_type: of the model.

    Raises:
        InputError: not a DeviceMesh, of several dimensions, of another device type, or without this process.
    """
    if not all(hasattr(mesh, name) for name in ("get_group", "ndim", "device_type", "get_coordinate")):
        raise InputError(f"tp_mesh takes a DeviceMesh, got {type(mesh).__name__}", "make one with init_device_mesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f"pass one of its dimensions, for instance tp_mesh=mesh[{names[-1]!r}]" if names else "name its dimensions, pass one"
        raise InputError(f"tp_mesh takes a one-dimensional mesh, this one has {mesh.ndim} dimensions", hint)
    if mesh.get_coordinate() is None:
        raise InputError("this process is not in tp_mesh", "call convert with tp_mesh on the ranks of the mesh only")
    if mesh.device_type != device_type:
        raise InputError(
            f"tp_mesh is of {mesh.device_type}, the model is on {device_type}", "move the model, or make the mesh for its device"
        )
    return Ranks(mesh.get_group(), mesh.size(), mesh.get_local_rank())


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of names, shapes, dtypes and values, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().contiguous().reshape(-1).cpu()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_alike(ranks: Ranks, what: str, digest: str, hint: str) -> None:
    """All ranks have to have the same; all raise if one has not.

    Raises:
        InputError: they differ.
    """
    said = ranks.all_of(digest)
    if len(set(said)) > 1:
        other = next(index for index, value in enumerate(said) if value != said[0])
        raise InputError(f"tp_mesh: {what} on rank {other} are not those on rank 0", hint)
