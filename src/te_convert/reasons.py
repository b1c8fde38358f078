"""Stable reason codes: why a site was not converted (refusal) or what a conversion does not give (advice).

A code is ``subject.cause`` and never changes its meaning; ``docs/reasons.md`` is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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


_R, _A = Severity.REFUSAL, Severity.ADVICE

REASONS: dict[ReasonCode, ReasonInfo] = {
    ReasonCode.USER_EXCLUDED: ReasonInfo(_R, "The caller excluded this site.", "remove the pattern from exclude= to convert it"),
    ReasonCode.USER_NOT_INCLUDED: ReasonInfo(
        _R, "include= was given and no pattern matches this site.", "add a pattern that matches it to include="
    ),
    ReasonCode.MODULE_NEVER_CALLED: ReasonInfo(
        _R,
        "No recorded run called this module, so nothing shows that it would ever run.",
        "pass example_inputs that reach it (a list records several scenarios)",
    ),
    ReasonCode.MODULE_NOT_OBSERVED: ReasonInfo(
        _R,
        "No run was recorded and the module's meaning needs one.",
        "pass example_inputs",
    ),
    ReasonCode.MODULE_SUBCLASS: ReasonInfo(
        _R,
        "The class overrides forward and a numeric probe shows that it computes something else.",
        "nothing to do: it is not the operation that TE replaces",
    ),
    ReasonCode.MODULE_METHODS: ReasonInfo(
        _R,
        "The class has public methods or properties that the TE module lacks and other code may call.",
        "drop the methods, or exclude the site",
    ),
    ReasonCode.MODULE_PARAMETRIZED: ReasonInfo(
        _R,
        "The weight is computed from other tensors before each call (weight_norm, spectral_norm, a parametrization).",
        "remove the parametrization first (torch.nn.utils.parametrize.remove_parametrizations)",
    ),
    ReasonCode.MODULE_WEIGHT_READ_ELSEWHERE: ReasonInfo(
        _R,
        "The weight is used past the module's forward, so a replaced forward would never run.",
        "call the module instead of reading its weight",
    ),
    ReasonCode.MODULE_CALL_ARGUMENTS: ReasonInfo(
        _R, "The module is called with arguments that the TE module does not take.", "call it with the input tensor alone"
    ),
    ReasonCode.MODULE_EXTRA_STATE: ReasonInfo(
        _R, "The module holds parameters, buffers or children beyond those of the operation.", "move them out of the module"
    ),
    ReasonCode.MODULE_SCRIPTED: ReasonInfo(
        _R, "The module is compiled TorchScript and cannot be edited.", "convert the Python model before scripting it"
    ),
    ReasonCode.MODULE_ALREADY_TE: ReasonInfo(_R, "The module is already a Transformer Engine module.", "nothing to do"),
    ReasonCode.MODEL_NOT_COPYABLE: ReasonInfo(
        _R, "copy.deepcopy of the model fails, or does not give a model of its own, so it was left unchanged.", "pass inplace=True"
    ),
    ReasonCode.PARAMETER_UNINITIALIZED: ReasonInfo(
        _R, "A lazy parameter has no shape yet.", "run the model once before converting it"
    ),
    ReasonCode.PARAMETER_SUBCLASS: ReasonInfo(
        _R,
        "A parameter is a quantised, sharded or otherwise special tensor.",
        "convert the plain model before quantising or sharding it",
    ),
    ReasonCode.PARAMETER_EMPTY: ReasonInfo(_R, "A parameter has no elements.", "nothing to do"),
    ReasonCode.PARAMETER_TIED_LAYOUT: ReasonInfo(
        _R,
        "The weight is shared with another module and TE needs it in another layout; converting would untie it.",
        "untie the weight first if that is what you want",
    ),
    ReasonCode.DTYPE_FLOAT64: ReasonInfo(_R, "TE has no float64 kernels.", "convert a float32, bfloat16 or float16 model"),
    ReasonCode.DTYPE_UNSUPPORTED: ReasonInfo(
        _R, "TE computes in float32, bfloat16 and float16 only.", "convert a float32, bfloat16 or float16 model"
    ),
    ReasonCode.DTYPE_MIXED: ReasonInfo(
        _R,
        "The module's parameters and its input have different dtypes; TE takes one dtype (or torch.autocast).",
        "bring parameters and inputs to one dtype",
    ),
    ReasonCode.NORM_NO_AFFINE: ReasonInfo(
        _R,
        "The norm has no weight; TE's norms always have one.",
        "nothing to do, or give the norm elementwise_affine=True",
    ),
    ReasonCode.NORM_MULTI_DIM: ReasonInfo(
        _R, "The norm averages over several dimensions; TE's fused paths take the last one.", "flatten the dimensions first"
    ),
    ReasonCode.NORM_NOT_RECOGNISED: ReasonInfo(
        _R, "Shaped like a norm, but the numeric probe shows another function.", "nothing to do: TE has no equivalent"
    ),
    ReasonCode.NORM_OUTPUT_DTYPE: ReasonInfo(
        _R, "The norm returns another dtype than its input; TE's returns the weight's dtype.", "cast after the norm"
    ),
    ReasonCode.PARITY_FAILED: ReasonInfo(
        _R, "The converted site did not compute the same numbers and was put back.", "please report it with the figures"
    ),
    ReasonCode.INTERNAL_ERROR: ReasonInfo(
        _R, "te_convert failed on this site and left it as it was.", "please report it with the detail"
    ),
    ReasonCode.ALIGNMENT_FEATURES: ReasonInfo(
        _A,
        "The recipe needs aligned feature dimensions; this site stays in high precision.",
        "pad the dimension to the multiple named",
    ),
    ReasonCode.ALIGNMENT_ROWS: ReasonInfo(
        _A,
        "The recipe needs an aligned number of rows (tokens) and a recorded call had another.",
        "nothing to do: rows are added on Transformer Engine and cut off again; a multiple saves that copy",
    ),
    ReasonCode.RECIPE_LOW_SQNR: ReasonInfo(
        _A,
        "Emulated on the example inputs, the recipe costs too much accuracy here, so this site stays in high precision.",
        "pass min_sqnr= (--min-sqnr) to accept more noise or less; take another recipe",
    ),
    ReasonCode.RECIPE_UNAVAILABLE: ReasonInfo(
        _A,
        "This machine's GPU cannot run the recipe; the model was converted for one that can.",
        "run the model on such a GPU, or take a recipe that this one has",
    ),
    ReasonCode.BENEFIT_FP8_SLOWER: ReasonInfo(
        _A,
        "The recipe is predicted to be slower here than high precision: quantising or the host costs more than the product gains.",
        "policy='benefit' (--policy benefit) keeps such sites in high precision; more tokens at once favour the recipe",
    ),
    ReasonCode.BENEFIT_NOT_WORTH_IT: ReasonInfo(
        _A,
        "For the whole model the recipe is predicted to gain nothing over high precision on this GPU.",
        "take recipe=None, or more tokens at once; te-convert estimate shows where the time goes",
    ),
    ReasonCode.RUNTIME_TE_TOO_OLD: ReasonInfo(
        _R,
        "The installed Transformer Engine does not know what this replacement needs: a class, an argument or an activation.",
        "upgrade transformer-engine, or use backend='reference'",
    ),
    ReasonCode.TP_REPLICATED: ReasonInfo(
        _A,
        "With tp_mesh, every rank holds this module whole: it is not provably part of a region that can be divided among ranks.",
        "reshape with -1 in the place of the number of heads, and keep q, k and v in Linears of their own",
    ),
    ReasonCode.TP_PARTS: ReasonInfo(
        _A,
        "With tp_mesh, the parts of this block are converted one by one: te_convert does not divide a whole block among ranks.",
        "nothing to do; without tp_mesh the block becomes one TE module",
    ),
    ReasonCode.FUSION_TE_TOO_OLD: ReasonInfo(
        _A,
        "The installed Transformer Engine cannot build the module that several sites could become; they were converted one by one.",
        "upgrade transformer-engine, or use backend='reference'",
    ),
    ReasonCode.CAPTURE_NO_GRAPH: ReasonInfo(
        _A,
        "No run of the model was recorded; the site was converted for what its module is, not for how it is used.",
        "pass example_inputs that run",
    ),
    ReasonCode.PARAMETER_NEW_OBJECT: ReasonInfo(
        _A,
        "TE needs the weight in another layout or as part of a larger one, so the converted module owns a new Parameter.",
        "create the optimizer after converting",
    ),
    ReasonCode.NORM_ROUNDING: ReasonInfo(
        _A,
        "TE computes the norm in float32 and rounds once; the original rounds earlier, so low-precision outputs differ slightly.",
        "nothing to do; parity is judged against the float32 original",
    ),
    ReasonCode.MODULE_SHARED_READ: ReasonInfo(
        _A,
        "The weight is also read outside this module; that use stays on plain PyTorch.",
        "nothing to do",
    ),
    ReasonCode.FUSION_OTHER_READER: ReasonInfo(
        _A,
        "Something besides Linears reads the norm's output, so norm and Linears are converted one by one.",
        "nothing to do: the value of the norm is needed",
    ),
    ReasonCode.FUSION_CALLS_DIFFER: ReasonInfo(
        _A,
        "The recorded calls do not show one fixed set of Linears behind the norm, so they are converted one by one.",
        "nothing to do",
    ),
    ReasonCode.FUSION_CROSSES_BLOCK: ReasonInfo(
        _A,
        "The norm and its readers lie in different repeated or checkpointed blocks, so they are converted one by one.",
        "nothing to do: a checkpoint around the block would break a fusion",
    ),
    ReasonCode.FUSION_TIED: ReasonInfo(
        _A, "The norm's parameters are shared with another module, so it is not fused.", "untie them first if that is what you want"
    ),
    ReasonCode.MODULE_HOOKS: ReasonInfo(
        _A, "A module inside a larger fusion has hooks, which would not run; the parts are converted instead.", "remove the hooks"
    ),
    ReasonCode.ACTIVATION_GELU_ERF: ReasonInfo(
        _A,
        "TE's MLP has the tanh GELU and the model the exact one, so the MLP is converted in parts.",
        'pass allow=("gelu-tanh",) to accept the difference (at most 4.7e-4 per activation)',
    ),
    ReasonCode.ACTIVATION_APPROXIMATED: ReasonInfo(
        _A, "An approximation that the caller allowed is in use.", "drop it from allow= for exact results"
    ),
    ReasonCode.MLP_NO_OWNER: ReasonInfo(
        _A,
        "No module is exactly this MLP, so it is converted in parts.",
        "put the Linears and the activation into a module of their own",
    ),
    ReasonCode.MLP_BIAS: ReasonInfo(
        _A, "Only some Linears of the MLP have a bias, so it is converted in parts.", "give all Linears of the MLP a bias, or none"
    ),
    ReasonCode.MLP_FLAGS: ReasonInfo(
        _A, "Gate and up cannot share one weight, so the MLP is converted in parts.", "freeze or train both alike, and untie them"
    ),
    ReasonCode.MLP_SHAPE: ReasonInfo(_A, "The MLP changes the width, so it is converted in parts.", "nothing to do"),
    ReasonCode.MLP_DROPOUT: ReasonInfo(
        _A, "A dropout inside the MLP cannot be watched, so it is converted in parts.", "use nn.Dropout instead of the function"
    ),
    ReasonCode.ATTENTION_IMPLEMENTATION: ReasonInfo(
        _R,
        "The model runs another attention implementation than SDPA or eager.",
        'load the model with attn_implementation="sdpa"',
    ),
    ReasonCode.ATTENTION_NOT_SWITCHABLE: ReasonInfo(
        _R,
        "The model does not let its attention implementation be exchanged.",
        "nothing to do: the model fixes its attention itself",
    ),
    ReasonCode.ATTENTION_NO_SDPA: ReasonInfo(
        _R,
        "The model says that SDPA is not right for it, so neither is what stands in for SDPA.",
        'load the model with attn_implementation="eager"',
    ),
    ReasonCode.ATTENTION_NAME_COMPARED: ReasonInfo(
        _R,
        "The model's code looks at the name of its attention implementation and would take another way under another name.",
        "load the model with the other implementation (sdpa or eager) where it has both",
    ),
    ReasonCode.ATTENTION_EXTRA_INPUTS: ReasonInfo(
        _R,
        "The attention is given tensors (sinks of each token, for instance) that the replacement does not take.",
        "nothing to do: the model's own attention runs",
    ),
    ReasonCode.ATTENTION_CALLS_DIFFER: ReasonInfo(
        _R, "The recorded calls have no common number of heads, size, scale or dropout.", "nothing to do"
    ),
    ReasonCode.ATTENTION_NOT_RECOGNISED: ReasonInfo(
        _R,
        "A numeric probe shows that the model's attention function is not plain softmax attention.",
        "nothing to do: TE has no equivalent",
    ),
    ReasonCode.BLOCK_FORM: ReasonInfo(
        _A, "The layer is not of the form that te.TransformerLayer has, so it is converted in parts.", "nothing to do"
    ),
    ReasonCode.BLOCK_DROPOUT: ReasonInfo(
        _A,
        "The layer has dropout where te.TransformerLayer has none, so it is converted in parts.",
        "set dropout to 0 to convert the layer as a whole",
    ),
    ReasonCode.BLOCK_CACHE: ReasonInfo(
        _A,
        "The recorded calls fill a cache of keys and values, which te.TransformerLayer does not: it is converted in parts.",
        "for a model that only trains or encodes, convert with use_cache=False among the example inputs",
    ),
    ReasonCode.ATTENTION_FORM: ReasonInfo(_A, "The attention module has a form that te.MultiheadAttention lacks.", "nothing to do"),
    ReasonCode.ATTENTION_WEIGHTS: ReasonInfo(
        _A,
        "The attention weights are asked for, which no fused attention computes.",
        "call the module with need_weights=False",
    ),
    ReasonCode.ATTENTION_EAGER_REGION: ReasonInfo(
        _R,
        "Attention is written out, and something between its two products, or a reader of them, is nothing that TE has.",
        "call torch.nn.functional.scaled_dot_product_attention, or keep to scaling, masks, biases, one softmax and one dropout",
    ),
    ReasonCode.ATTENTION_MIXED: ReasonInfo(
        _A,
        "The recorded calls are not all self-attention, or not all attention to one other tensor.",
        "use separate modules for the two",
    ),
    ReasonCode.MOE_FORM: ReasonInfo(
        _A,
        "Stacked weights that are not those of experts of a known form, so they stay as they are.",
        "TE's grouped products need act(x @ W1) @ W2 per expert, called with tokens, indices and weights",
    ),
    ReasonCode.MOE_FORWARD: ReasonInfo(
        _A,
        "A mixture of expert modules is not proved to compute just that, so its Linears are converted one by one.",
        "TE's grouped products need bias-free experts, one gate, a softmax with top-k, and nothing else in the mixture",
    ),
    ReasonCode.FUSION_FAILED: ReasonInfo(
        _A, "A fusion rule failed here; the sites are converted one by one.", "please report it with the detail"
    ),
}


_ADVICE_CODES = frozenset(code.value for code, info in REASONS.items() if info.severity is Severity.ADVICE)


class Reason(NamedTuple):
    """One reason of one site; unpacks as ``(code, detail, hint)``.

    Attributes:
        code: stable slug, one of :class:`ReasonCode`.
        detail: what was seen at this site, with figures.
        hint: what the user can do.
    """

    code: str
    detail: str
    hint: str

    @property
    def is_advice(self) -> bool:
        """True when the reason did not stop the conversion; a code that this version does not know is a refusal."""
        return self.code in _ADVICE_CODES


def reason(code: ReasonCode, detail: str, hint: str | None = None) -> Reason:
    """Build a :class:`Reason`, taking the code's default hint when none is given."""
    return Reason(code.value, detail, REASONS[code].hint if hint is None else hint)
