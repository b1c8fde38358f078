"""The codes of reasons, and what is known about each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """A refusal leaves the site as it was; an advice converts it and says what to know."""

    REFUSAL = "refusal"
    ADVICE = "advice"


class ReasonCode(str, Enum):
    """Every code that a report can contain."""

    USER_EXCLUDED = "user.excluded"
    USER_NOT_INCLUDED = "user.not-included"
    MODULE_NEVER_CALLED = "module.never-called"
    MODULE_NOT_OBSERVED = "module.not-observed"
    MODULE_SUBCLASS = "module.subclass"
    MODULE_METHODS = "module.public-methods"
    MODULE_PARAMETRIZED = "module.parametrized"
    MODULE_WEIGHT_READ_ELSEWHERE = "module.weight-read-elsewhere"
    MODULE_CALL_ARGUMENTS = "module.call-arguments"
    MODULE_EXTRA_STATE = "module.extra-state"
    MODULE_SCRIPTED = "module.scripted"
    MODULE_ALREADY_TE = "module.already-te"
    MODEL_NOT_COPYABLE = "model.not-copyable"
    PARAMETER_UNINITIALIZED = "parameter.uninitialized"
    PARAMETER_SUBCLASS = "parameter.tensor-subclass"
    PARAMETER_EMPTY = "parameter.empty"
    PARAMETER_TIED_LAYOUT = "parameter.tied-layout"
    DTYPE_FLOAT64 = "dtype.float64"
    DTYPE_UNSUPPORTED = "dtype.unsupported"
    DTYPE_MIXED = "dtype.mixed"
    NORM_NO_AFFINE = "norm.no-affine"
    NORM_MULTI_DIM = "norm.multi-dim"
    NORM_NOT_RECOGNISED = "norm.not-recognised"
    NORM_OUTPUT_DTYPE = "norm.output-dtype"
    PARITY_FAILED = "parity.failed"
    INTERNAL_ERROR = "internal.error"
    ALIGNMENT_FEATURES = "alignment.features"
    ALIGNMENT_ROWS = "alignment.rows"
    RECIPE_LOW_SQNR = "recipe.low-sqnr"
    RECIPE_UNAVAILABLE = "recipe.unavailable"
    BENEFIT_FP8_SLOWER = "benefit.fp8-slower"
    BENEFIT_NOT_WORTH_IT = "benefit.not-worth-it"
    RUNTIME_TE_TOO_OLD = "runtime.te-too-old"
    TP_REPLICATED = "tp.replicated"
    TP_PARTS = "tp.parts"
    FUSION_TE_TOO_OLD = "fusion.te-too-old"
    CAPTURE_NO_GRAPH = "capture.no-graph"
    PARAMETER_NEW_OBJECT = "parameter.new-object"
    NORM_ROUNDING = "norm.rounding"
    MODULE_SHARED_READ = "module.weight-also-read"
    FUSION_OTHER_READER = "fusion.other-reader"
    FUSION_CALLS_DIFFER = "fusion.calls-differ"
    FUSION_CROSSES_BLOCK = "fusion.crosses-block"
    FUSION_TIED = "fusion.tied"
    FUSION_FAILED = "fusion.failed"
    MODULE_HOOKS = "module.hooks"
    ACTIVATION_GELU_ERF = "activation.gelu-erf"
    ACTIVATION_APPROXIMATED = "activation.approximated"
    MLP_NO_OWNER = "mlp.no-owner"
    MLP_BIAS = "mlp.bias"
    MLP_FLAGS = "mlp.flags"
    MLP_SHAPE = "mlp.shape"
    MLP_DROPOUT = "mlp.dropout"
    MOE_FORM = "moe.form"
    MOE_FORWARD = "moe.forward"
    BLOCK_FORM = "block.form"
    BLOCK_DROPOUT = "block.dropout"
    BLOCK_CACHE = "block.cache"
    ATTENTION_FORM = "attention.form"
    ATTENTION_MIXED = "attention.mixed-use"
    ATTENTION_WEIGHTS = "attention.weights-asked"
    ATTENTION_EAGER_REGION = "attention.eager-region"
    ATTENTION_IMPLEMENTATION = "attention.implementation"
    ATTENTION_NOT_SWITCHABLE = "attention.not-switchable"
    ATTENTION_NO_SDPA = "attention.no-sdpa"
    ATTENTION_NAME_COMPARED = "attention.name-compared"
    ATTENTION_EXTRA_INPUTS = "attention.extra-inputs"
    ATTENTION_CALLS_DIFFER = "attention.calls-differ"
    ATTENTION_NOT_RECOGNISED = "attention.not-recognised"


@dataclass(frozen=True)
class ReasonInfo:
    """What a code means: its severity, one sentence, and the default hint."""

    severity: Severity
    meaning: str
    hint: str
