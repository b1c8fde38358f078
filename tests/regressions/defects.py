"""What peers' converters do to a model; tests name an entry by its key, as they name a report (reports.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

PEERS = ("accelerate", "Lightning", "NeMo", "Model Optimizer", "torchao", "others")


@dataclass(frozen=True)
class Defect:
    """Something that a peer's converter does to a model.

    Attributes:
        key: the reference that tests name.
        case: the model.
        peers: what becomes of it; a name that is missing was not looked at.
        ours: what becomes of it here.
    """

    key: str
    case: str
    ours: str
    peers: dict[str, str] = field(default_factory=dict)


def _three(what: str, **more: str) -> dict[str, str]:
    return {**dict.fromkeys(PEERS[:3], f"{what} ᴿ"), **more}


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "peer:siblings-after-an-odd-layer",
        "five layers of which the second has a size that is no multiple of 16",
        "all five converted; the odd ones stay in high precision under a recipe, with the reason",
        {
            "accelerate": "stops there, silently ᴿ",
            "Lightning": "leaves it, warns ᶜ",
            "NeMo": "leaves it ᶜ",
            "Model Optimizer": "stops there ᶜ",
        },
    ),
    Defect(
        "peer:which-dimension-is-aligned",
        "Linear(24, 32) under FP8",
        "stays in high precision: `alignment.features`",
        {"Lightning": "converted, raises in FP8 ᴿ"},
    ),
    Defect(
        "peer:tied-weights", "embedding and head share a weight", "one Parameter afterwards too", _three("untied", torchao="kept ᶜ")
    ),
    Defect(
        "peer:one-module-twice", "one module under two names", "one site with an alias", _three("converted under one name only")
    ),
    Defect("peer:frozen-parameters", "`requires_grad=False`", "kept", _three("trainable again", torchao="kept ᶜ")),
    Defect("peer:train-flags", "a model in eval mode", "kept, module by module", _three("in train mode", torchao="lost ᶜ")),
    Defect("peer:hooks", "a forward hook", "kept, and its handle still removes it", _three("gone", torchao="gone ᶜ")),
    Defect(
        "peer:subclass-with-its-own-forward",
        "a subclass of nn.Linear that computes something else",
        "left alone: `module.subclass`",
        _three("replaced, output changes", torchao="replaced ᶜ"),
    ),
    Defect("peer:weight-norm", "a parametrized weight", "left alone: `module.parametrized`", _three("parametrization dropped")),
    Defect("peer:root-linear", "the model is one nn.Linear", "a new root is returned", _three("untouched")),
    Defect("peer:norm-without-affine", "LayerNorm(elementwise_affine=False)", "left alone: `norm.no-affine`", _three("raises")),
    Defect("peer:norm-over-two-dimensions", "LayerNorm((4, 16))", "left alone: `norm.multi-dim`", _three("wrong shape")),
    Defect(
        "peer:norm-without-bias",
        "LayerNorm(bias=False)",
        "converted; TE's bias is a zero that is neither trained nor saved",
        {"accelerate": "a new trainable bias ᴿ", "Lightning": "a new trainable bias ᴿ", "NeMo": "raises ᴿ"},
    ),
    Defect(
        "peer:rms-norm",
        "nn.RMSNorm and its many relatives",
        "recognised by their numbers and converted",
        {"accelerate": "untouched ᶜ", "Lightning": "untouched ᶜ", "NeMo": "raises ᴿ"},
    ),
    Defect(
        "peer:attention-out-proj",
        "nn.MultiheadAttention",
        "te.MultiheadAttention as a whole, or left alone; never its `out_proj`",
        _three("`out_proj` replaced, never runs", torchao="convert_to_float8_training: the same; quantize_: left alone ᶜ"),
    ),
    Defect("peer:way-back", "back to the original modules", "`revert`, exact", {"accelerate": "raises ᴿ"}),
    Defect(
        "peer:optimizer",
        "an optimizer made before the conversion, of tied weights",
        "`remap_optimizer` by identity, moments joined as the weights are",
        {"accelerate": "the new weight is missing ᴿ"},
    ),
    Defect(
        "peer:default-filter",
        "the filter that is applied when none is given",
        "there is none: every site is judged, `exclude` takes names out",
        {"accelerate": "its default for torchao filters nothing ᴿ"},
    ),
    Defect(
        "peer:rope-of-the-config",
        "rotary embeddings with another base, and a padded batch",
        "the model's own rotary embedding and masks stay",
        {"others": "TE's te_llama: base 10000 and a causal mask whatever the model says ᶜ"},
    ),
    Defect(
        "peer:attention-dropout",
        "dropout inside attention while training",
        "the same probability, or the original's attention",
        {"others": "NeMo AutoModel: lost where TE runs ᶜ"},
    ),
)
