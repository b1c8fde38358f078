"""Reasons of several modules together: norm and Linears, MLP, mixture of experts, attention, layer."""

from __future__ import annotations

from te_convert.reasons.codes import ReasonCode, ReasonInfo, Severity

_R, _A = Severity.REFUSAL, Severity.ADVICE

GROUPS: dict[ReasonCode, ReasonInfo] = {
    ReasonCode.FUSION_TE_TOO_OLD: ReasonInfo(
        _A,
        "The installed Transformer Engine cannot build the module that several sites could become; they were converted one by one.",
        "upgrade transformer-engine, or use backend='reference'",
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
