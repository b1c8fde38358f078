"""Re-usable guards: each looks at one candidate and returns a reason or None.  All run, so a site gets all its reasons at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from te_convert.facts.linears import packed_weight
from te_convert.facts.stand_in import has_no_shape
from te_convert.match.candidate import Candidate
from te_convert.reasons import Reason, ReasonCode, reason

Guard = Callable[[Candidate], Reason | None]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMMON_METHODS = frozenset(
    {"forward", "reset_parameters", "extra_repr", "from_pretrained", "init_weights", "initialize", "initialize_parameters"}
)


def not_scripted(site: Candidate) -> Reason | None:
    """TorchScript modules cannot be edited."""
    if isinstance(site.module, torch.jit.ScriptModule):
        return reason(ReasonCode.MODULE_SCRIPTED, f"{type(site.module).__name__}")
    return None


def initialized(site: Candidate) -> Reason | None:
    """Lazy parameters have no shape."""
    lazy = [name for name, parameter in site.parameters.items() if has_no_shape(parameter)]
    return reason(ReasonCode.PARAMETER_UNINITIALIZED, ", ".join(lazy)) if lazy else None


def plain_tensors(site: Candidate) -> Reason | None:
    """Quantised, sharded and wrapped parameters are not copied into TE modules."""
    for name, parameter in site.parameters.items():
        if has_no_shape(parameter):
            continue
        kinds = {type(parameter), type(parameter.data)} - {nn.Parameter, torch.Tensor}
        if kinds:
            return reason(ReasonCode.PARAMETER_SUBCLASS, f"{name} is a {', '.join(sorted(kind.__name__ for kind in kinds))}")
    packed = packed_weight(site.module)
    return reason(ReasonCode.PARAMETER_SUBCLASS, packed) if packed else None


def not_empty(site: Candidate) -> Reason | None:
    """Parameters without elements."""
    for name, parameter in site.parameters.items():
        if not has_no_shape(parameter) and parameter.numel() == 0:
            return reason(ReasonCode.PARAMETER_EMPTY, f"{name} has shape {tuple(parameter.shape)}")
    return None


def not_parametrized(site: Candidate) -> Reason | None:
    """A weight that is computed before each call is not a Parameter that TE could own."""
    return reason(ReasonCode.MODULE_PARAMETRIZED, site.parametrization) if site.parametrization else None


def te_dtype(site: Candidate) -> Reason | None:
    """TE computes in float32, bfloat16 and float16."""
    dtypes = {p.dtype for p in site.module.parameters() if not has_no_shape(p)}  # also those behind a parametrization
    if torch.float64 in dtypes:
        return reason(ReasonCode.DTYPE_FLOAT64, "parameters are float64")
    other = dtypes - set(_DTYPES)
    return reason(ReasonCode.DTYPE_UNSUPPORTED, f"parameters are {_names(other)}") if other else None


def floating_point(site: Candidate) -> Reason | None:
    """Integer and complex parameters, on which no probe can run."""
    numbers = all(p.is_floating_point() for p in site.parameters.values() if not has_no_shape(p))
    return None if numbers else te_dtype(site)


def one_dtype(site: Candidate) -> Reason | None:
    """TE takes one dtype for parameters and input."""
    own = {parameter.dtype for parameter in site.parameters.values()}
    inputs = site.input_dtypes
    if len(own) > 1:
        return reason(ReasonCode.DTYPE_MIXED, f"parameters are {_names(own)}")
    if own and inputs - own:
        return reason(ReasonCode.DTYPE_MIXED, f"parameters are {_names(own)}, recorded inputs {_names(inputs)}")
    return None


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def executed(site: Candidate) -> Reason | None:
    """A module whose forward never ran: its weight is read elsewhere, or nothing reaches it."""
    if site.calls:
        return None
    if site.direct_uses:
        use = site.direct_uses[0]
        where = use.where or "the model"
        return reason(ReasonCode.MODULE_WEIGHT_READ_ELSEWHERE, f"{use.parameter} is read by {use.function} in {where}")
    if any(isinstance(parent, nn.MultiheadAttention) for parent in site.parents):
        return reason(ReasonCode.MODULE_WEIGHT_READ_ELSEWHERE, "torch's MultiheadAttention reads this weight itself")
    return reason(ReasonCode.MODULE_NEVER_CALLED, "0 calls in the recorded runs") if site.has_graph else None


def single_argument(site: Candidate) -> Reason | None:
    """The replacement takes the input tensor and nothing else."""
    for call in site.calls:
        if call.n_positional + len(call.keywords) != 1 or len(call.args) != 1:
            keywords = f", keywords {', '.join(call.keywords)}" if call.keywords else ""
            return reason(ReasonCode.MODULE_CALL_ARGUMENTS, f"called with {call.n_positional} positional{keywords}")
    return None


def no_public_methods(site: Candidate) -> Reason | None:
    """Methods and properties of a subclass that other code may call on the module."""
    extra: list[str] = []
    for cls in type(site.module).__mro__:
        if cls.__module__.startswith("torch."):
            break
        members = (
            name for name, value in vars(cls).items() if callable(value) or isinstance(value, (property, staticmethod, classmethod))
        )
        extra += [name for name in members if not name.startswith("_") and name not in _COMMON_METHODS]
    return reason(ReasonCode.MODULE_METHODS, f"{type(site.module).__name__} has {', '.join(sorted(set(extra)))}") if extra else None


def graph_was_recorded(site: Candidate) -> Reason | None:
    """Advice: the site was judged by what it is, not by how it is used."""
    return None if site.has_graph else reason(ReasonCode.CAPTURE_NO_GRAPH, "no run of the model was recorded")


def aligned_rows(site: Candidate) -> Reason | None:
    """Advice: recorded rows (product of the leading dimensions) that the recipe cannot take unpadded."""
    if site.alignment is None:
        return None
    for call in site.calls:
        rows = 1
        for size in (call.input_shape or ())[:-1]:
            rows *= size
        if rows % site.alignment.rows:
            return reason(ReasonCode.ALIGNMENT_ROWS, f"{rows} rows recorded, the recipe needs a multiple of {site.alignment.rows}")
    return None


ALWAYS: tuple[Guard, ...] = (
    not_scripted,
    initialized,
    plain_tensors,
    not_empty,
    not_parametrized,
    te_dtype,
    one_dtype,
    executed,
    single_argument,
    no_public_methods,
    graph_was_recorded,
)
"""Guards of every module swap, in the order in which their reasons are shown."""

BEFORE_PROBES: tuple[Guard, ...] = (not_scripted, initialized, plain_tensors, not_empty, not_parametrized, floating_point)
"""Guards that must hold before the module's mathematics can be probed."""


def layout_is_free(site: Candidate, keeps_layout: bool) -> tuple[Reason, ...]:
    """May the weight change its name or layout?  Ties and reads from elsewhere need it as it is."""
    reasons = []
    if not keeps_layout and site.ties:
        name, others = next(iter(site.ties.items()))
        reasons.append(reason(ReasonCode.PARAMETER_TIED_LAYOUT, f"{name} is also {', '.join(others)}"))
    if site.calls and site.direct_uses:
        use = site.direct_uses[0]
        detail = f"{use.parameter} is read by {use.function} in {use.where or 'the model'}"
        code = ReasonCode.MODULE_SHARED_READ if keeps_layout else ReasonCode.MODULE_WEIGHT_READ_ELSEWHERE
        reasons.append(reason(code, detail))
    return tuple(reasons)


def aligned_features(site: Candidate, in_features: int, out_features: int) -> Reason | None:
    """Advice: feature dimensions that the recipe cannot take; the site then stays in high precision."""
    if site.alignment is None:
        return None
    multiple = site.alignment.features
    bad = [f"{name} {size}" for name, size in (("in", in_features), ("out", out_features)) if size % multiple]
    return reason(ReasonCode.ALIGNMENT_FEATURES, f"{', '.join(bad)}: not a multiple of {multiple}") if bad else None
