"""What is measured: a training step, a forward, or a generation; and how many tokens or samples it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors
from te_convert.errors import InputError

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """One kind of work on one input.

    Attributes:
        training: a forward and a backward in training mode; otherwise a forward in eval mode.
        generate: number of tokens to generate, 0 for a plain call.
    """

    scenario: Scenario
    training: bool
    generate: int = 0

    @property
    def words(self) -> str:
        """For reports."""
        if self.generate:
            return f"generation of {self.generate} tokens"
        return "training step" if self.training else "inference"

    @property
    def items(self) -> tuple[str, int]:
        """What is counted per second, and how many a call has.

        Tokens are the elements of a first input of integers, and all but the last dimension of one of three dimensions; of other
        inputs the first dimension counts samples.
        """
        first = next((tensor for _, tensor in iter_tensors((self.scenario.args, self.scenario.kwargs))), None)
        if first is None or first.dim() == 0:
            return "samples", 1
        if self.generate:
            return "tokens", first.shape[0] * self.generate
        if not first.is_floating_point():
            return "tokens", first.numel()
        return ("tokens", first.shape[0] * first.shape[1]) if first.dim() == 3 else ("samples", first.shape[0])

    def prepare(self, model: nn.Module) -> None:
        """Put the model into the mode of the work.

        Raises:
            InputError: it cannot generate.
        """
        if self.generate and not callable(getattr(model, "generate", None)):
            raise InputError(f"{type(model).__name__} has no generate()", "leave out --generate")
        model.train(self.training)

    def once(self, model: nn.Module, enter: Enter) -> Any:
        """Do the work; returns generated tokens, or nothing."""
        if self.generate:
            return self._generate(model, enter)
        if not self.training:
            with torch.no_grad(), enter():
                self.scenario.call(model)
            return None
        model.zero_grad(set_to_none=True)
        with enter():
            loss = loss_of(self.scenario.call(model))
        loss.backward()
        return None

    def _generate(self, model: Any, enter: Enter) -> Tensor:
        new = self.generate
        with torch.no_grad(), enter():
            output = model.generate(
                *self.scenario.args, **self.scenario.kwargs, max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
        tokens = output if isinstance(output, Tensor) else output.sequences
        return tokens[:, -new:]


def loss_of(output: Any) -> Tensor:
    """The output's own ``loss``, else the sum of the mean squares of all outputs that depend on a parameter, in float32.

    Raises:
        InputError: no output does.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own
    terms = [tensor.float().square().mean() for _, tensor in iter_tensors(output) if tensor.requires_grad]
    if not terms:
        raise InputError("no output depends on a parameter that is trained", "measure inference instead: --inference")
    return torch.stack(terms).sum()


def describe_inputs(scenario: Scenario) -> dict[str, str]:
    """``{"input_ids": "int64[2, 128]"}``."""
    found = (*iter_tensors(scenario.args, "args"), *((path.strip("[]'"), t) for path, t in iter_tensors(scenario.kwargs)))
    return {path: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for path, tensor in found}
