"""Random descriptions of models."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property.composer import ACTIVATION_NAMES, NORMS, AttentionForm, BlockForm, MLPForm, ModelForm, NormForm

NORM = st.builds(NormForm, st.sampled_from(NORMS), st.sampled_from((1e-5, 1e-6, 1e-3)), st.booleans())


@st.composite
def mlps(draw: st.DrawFn) -> MLPForm:
    """An MLP; one whose Linears are the block's own is plain."""
    owner = draw(st.booleans())
    return MLPForm(
        gate=draw(st.sampled_from(("none", "separate", "packed", "swapped"))) if owner else "none",
        activation=draw(st.sampled_from(ACTIVATION_NAMES)),
        bias_in=draw(st.booleans()),
        bias_out=draw(st.booleans()),
        owner=owner,
        keyword=draw(st.booleans()),
    )


ATTENTION = st.builds(
    AttentionForm,
    kv_heads=st.sampled_from((4, 2, 1)),
    packed=st.booleans(),
    bias=st.booleans(),
    bias_out=st.booleans(),
    mask=st.sampled_from(("none", "causal", "bool", "float")),
    scale=st.sampled_from((None, 0.3)),
    repeat=st.booleans(),
)


@st.composite
def blocks(draw: st.DrawFn) -> BlockForm:
    """A block with attention, an MLP, or both."""
    parts = draw(st.sampled_from(("both", "attention", "mlp")))
    return BlockForm(
        norm=draw(NORM),
        attention=draw(ATTENTION) if parts != "mlp" else None,
        mlp=draw(mlps()) if parts != "attention" else None,
        placement=draw(st.sampled_from(("pre", "post", "parallel", "parallel-two"))),
        residual=draw(st.sampled_from(("x+f", "f+x", "f+=x", "add"))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1))),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelForm:
    """One to two blocks, called one to three times."""
    made = draw(st.lists(blocks(), min_size=1, max_size=2).map(tuple))
    tokens = draw(st.booleans())
    return ModelForm(
        blocks=made,
        order=draw(st.sampled_from(((0,), (0, 0)) if len(made) == 1 else ((0, 1), (0, 1, 0), (1, 0)))),
        width=draw(st.sampled_from((16, 32))),
        tokens=tokens,
        final=draw(st.none() | NORM),
        head=draw(st.sampled_from(("none", "own", "tied") if tokens else ("none", "own"))),
        ties=draw(st.sampled_from(("", "", "down", "proj", "norm"))),
        frozen=tuple(draw(st.lists(st.integers(0, 30), max_size=3, unique=True))),
        hooked=draw(st.sampled_from((-1, -1, *range(30)))),
        dtype=draw(st.sampled_from(("float32", "float32", "bfloat16"))),
        output=draw(st.sampled_from(("tensor", "tuple", "dict"))),
    )
