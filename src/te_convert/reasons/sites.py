"""Reasons of single modules: their class, parameters, dtype, precision and what they run on."""

from __future__ import annotations

from te_convert.reasons.codes import ReasonCode, ReasonInfo, Severity

_R, _A = Severity.REFUSAL, Severity.ADVICE

SITES: dict[ReasonCode, ReasonInfo] = {
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
    ReasonCode.MODULE_HOOKS: ReasonInfo(
        _A, "A module inside a larger fusion has hooks, which would not run; the parts are converted instead.", "remove the hooks"
    ),
}
