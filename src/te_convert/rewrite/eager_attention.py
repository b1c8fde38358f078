"""Modules that write their attention out: their forward runs under a mode in which scores are lazy, see lazy_scores.py.

    (q @ k.T · scale + bias).masked_fill(mask, -inf).softmax(-1) @ v   ->  te.DotProductAttention(q, k, v)

The class is swapped for a subclass, so the module keeps its identity and its own forward, which still decides what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.scores import Scores, begin, product_operands, step
from te_convert.reference.unsupported import NotSupportedError
from te_convert.replacements.specs import DotProductAttentionSpec
from te_convert.rewrite.attention import _EXACT, _NO_BACKEND
from te_convert.rewrite.fused import FusedRecord, Inputs
from te_convert.rewrite.lazy import LazyNorm, _map, can_defer
from te_convert.rewrite.lazy_scores import _HERE, Pending, WatchScores
from te_convert.rewrite.loans import Borrower, give_back, is_borrower, lend
from te_convert.rewrite.score_masks import ScoreMasking, find_masking

RULE = "eager-attention"
_RECORD = "_te_convert_eager_attention"
"""Where a module keeps its record."""
_SAME = 1e-6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EagerAttention(Borrower):
    """A module whose written-out attention goes to te.DotProductAttention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward; its products are looked at where they may be replaced."""
        record: EagerRecord | None = self.__dict__.get(_RECORD)
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if record is None or not record.enabled or not can_defer(_plain(first)):
            return self.eager(*args, **kwargs)
        with WatchScores(record):
            return self._te_base.forward(self, *args, **kwargs)


def _plain(value: Any) -> Any:
    """A deferred norm's output stands for an ordinary tensor."""
    return value.pending.x if type(value) is LazyNorm else value


@dataclass(frozen=True)
class EagerRun:
    """One attention as it was written, and how TE masks it: what verification repeats.

    Attributes:
        last: the operation that gave the probabilities.
        func: the product with the values; ``args`` and ``kwargs`` are its arguments, with a stand-in for the probabilities.
        value: [*lead, skv, dv].
    """

    last: Pending
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    masking: ScoreMasking
    heads: int

    def original(self) -> Tensor:
        """[*lead, sq, dv] as the operations were written."""
        probabilities = self.last.replay()
        args, kwargs = _map((self.args, self.kwargs), lambda item: probabilities if item is _HERE else item)
        result: Tensor = self.func(*args, **kwargs)
        return result

    def converted(self, module: nn.Module) -> Tensor:
        """[*lead, sq, dv] from te.DotProductAttention."""
        scores, masking = self.last.scores, self.masking
        tensors = [_heads_apart(tensor, self.heads).transpose(1, 2) for tensor in (scores.query, scores.key, self.value)]
        device = scores.query.device.type
        if torch.is_autocast_enabled(device):
            tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
        query, key, value = tensors
        options: dict[str, Any] = {"attn_mask_type": masking.mask_type}
        if "causal" in masking.mask_type:
            options["window_size"] = (-1, 0)
        if masking.mask_type == "padding" and masking.mask is not None:
            padded = masking.mask.expand(query.shape[0], 1, 1, key.shape[1])
            options["attention_mask"] = (padded.new_zeros(query.shape[0], 1, 1, query.shape[1]), padded)
        elif masking.mask is not None:
            options["attention_mask"] = masking.mask
        if masking.bias is not None:
            options |= {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": masking.bias.to(query.dtype).contiguous(),
            }
        output: Tensor = module(query, key, value, **options)
        output = output.view(*output.shape[:-1], self.heads, self.value.shape[-1]).transpose(1, 2)
        return output.reshape(*self.value.shape[:-2], *output.shape[-2:]).contiguous()


def _heads_apart(tensor: Tensor, heads: int) -> Tensor:
    """[b · h, s, d] or [..., h, s, d] as [b, h, s, d]."""
    return tensor.unflatten(0, (-1, heads)) if tensor.dim() == 3 else tensor.flatten(0, tensor.dim() - 4)


@dataclass(eq=False)
class EagerRecord(FusedRecord):
    """What a te.DotProductAttention in a module that writes its attention out knows about itself.

    Attributes:
        why_not: why calls ran as written, as a count of each cause.
    """

    why_not: dict[str, int] = field(default_factory=dict)

    @property
    def owner(self) -> nn.Module:
        """The attention module."""
        return self.members[0][1]

    @property
    def spec(self) -> DotProductAttentionSpec:
        """The TE module's constructor facts."""
        assert isinstance(self.decision.spec, DotProductAttentionSpec)
        return self.decision.spec

    def wants(self, scores: Scores) -> bool:
        """Heads and sizes are those of the site."""
        spec, lead = self.spec, scores.lead
        fits = lead[0] % spec.num_attention_heads == 0 if len(lead) == 1 else lead[-1] == spec.num_attention_heads
        return fits and scores.query.shape[-1] == spec.kv_channels[0] and min(scores.shape) > 0

    def must_be_exact(self) -> bool:
        """Verification compares with the original's random numbers."""
        return _EXACT.get()

    def fell_back(self) -> None:
        """Scores were computed as written."""
        self.fallbacks += 1

    def finish(self, last: Pending, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The TE module's output for a call; None, counted, where it cannot compute the same."""
        run = self._plan(last, func, args, kwargs)
        output = None if run is None else self._try(run)
        if run is None or output is None:
            return None
        if last.scores.dropout:
            self.executed += 1  # two runs draw different numbers, so there is nothing to compare
        else:
            self.ran(((run,), {}), output)
        return output

    def _plan(self, last: Pending, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerRun | None:
        pair = product_operands(
            getattr(func, "__name__", ""), *_map((args, kwargs), lambda v: last.scores.query if v is _HERE else v)
        )
        if pair is None:
            return self._no("the product with the values has another form")
        scores, value, spec = last.scores, pair[1], self.spec
        fits = value.shape == (*scores.lead, scores.shape[-1], spec.kv_channels[1]) and value.device == scores.query.device
        if not scores.is_softmax or not fits:
            return self._no("there is no softmax, or the values have other sizes")
        planned = float(spec.kv_channels[0]) ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
        if abs(scores.scale - planned) > _SAME * abs(planned):
            return self._no("the scale differs")
        if scores.dropout != (spec.attention_dropout if self.module.training else 0.0):
            return self._no("the dropout differs")
        dtypes = {scores.query.dtype, value.dtype}
        wide = (torch.float64,) if self.backend == "reference" else ()
        autocast = torch.is_autocast_enabled(value.device.type)
        if not dtypes <= {*_DTYPES, *wide} or (not autocast and (len(dtypes) > 1 or scores.dtype != value.dtype)):
            return self._no("the dtypes differ")
        masking = find_masking(scores, spec.num_attention_heads)
        if masking is None:
            return self._no("TE has no such mask or bias")
        return EagerRun(last, func, args, kwargs, value, masking, spec.num_attention_heads)

    def _no(self, why: str) -> EagerRun | None:
        self.why_not[why] = self.why_not.get(why, 0) + 1
        return None

    def _try(self, run: EagerRun) -> Tensor | None:
        try:
            return run.converted(self.module)
        except NotSupportedError as error:
            self._no(str(error))
        except ValueError as error:
            if _NO_BACKEND not in str(error):
                raise
            self._no(_NO_BACKEND)
        return None

    def run_again(self, inputs: Inputs) -> Tensor:
        """The TE module on a call that was observed."""
        run: EagerRun = inputs[0][0]
        if run.masking.bias is not None:  # a scaled bias was rounded once; in another precision it is made anew
            run = replace(run, masking=find_masking(run.last.scores, run.heads) or run.masking)
        return run.converted(self.module)

    def run_original(self, inputs: Inputs, own: Any = None) -> Tensor:
        """The operations as they were written on a call that was observed."""
        del own
        run: EagerRun = inputs[0][0]
        return run.original()

    def sample_inputs(self) -> Inputs | None:
        """Seeded random queries, keys and values [2, heads, 7, d] without a mask, for a site that no run reached."""
        spec, generator = self.spec, torch.Generator().manual_seed(0)
        parameter = next(self.owner.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        query, key, value = (
            torch.randn(2, spec.num_attention_heads, 7, size, generator=generator, dtype=torch.float32).to(
                device, getattr(torch, spec.dtype)
            )
            for size in (spec.kv_channels[0], *spec.kv_channels)
        )
        scale = float(spec.kv_channels[0]) ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
        steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(torch.mul, (_HERE, scale)), (torch.softmax, (_HERE, -1))]
        scores = begin("matmul", (query, key.transpose(-1, -2)), {})
        assert scores is not None
        last = Pending(self, scores, None, torch.matmul, (query, key.transpose(-1, -2)), {})
        for func, args in steps:
            following = step(last.scores, _HERE, func.__name__, args, {})
            assert following is not None
            last = Pending(self, following, last, func, args, {})
        masking = ScoreMasking("no_mask")
        return ((EagerRun(last, torch.matmul, (_HERE, value), {}, value, masking, spec.num_attention_heads),), {})

    def attach(self) -> None:
        """Let the module's forward run under the mode.

        Raises:
            ValueError: the module belongs to another fusion.
        """
        if is_borrower(self.owner):
            raise ValueError(f"{self.decision.scope} is part of another fusion")
        self.owner.__dict__[_RECORD] = self
        lend(self.owner, EagerAttention, {})

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.owner.__dict__.pop(_RECORD, None) is not None and is_borrower(self.owner):
            give_back(self.owner, {})

    def __deepcopy__(self, memo: Any) -> EagerRecord:
        new = EagerRecord(self.decision, nn.Module(), nn.Module(), self.backend, enabled=self.enabled)
        memo[id(self)] = new
        new.module, new.scope = copy.deepcopy(self.module, memo), copy.deepcopy(self.scope, memo)
        new.members = copy.deepcopy(self.members, memo)
        return new
