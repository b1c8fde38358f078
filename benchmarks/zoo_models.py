"""Models for the zoo: timm and diffusers models, torch's own layers, hand-written GPTs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "coatnet_0_rw_224", "convit_tiny", "crossvit_tiny_240", "csatv2",
    "davit_tiny", "deepseek_vit_412m", "deit3_small_patch16_224", "deit_tiny_patch16_224", "edgenext_xx_small",
    "efficientformer_l1", "efficientvit_b0", "eva02_tiny_patch14_224", "gcvit_xxtiny", "gemma4_vit_167m", "gmlp_ti16_224",
    "halonet_h1", "hiera_tiny_224", "jx_nest_tiny", "levit_128s", "maxvit_tiny_tf_224", "mixer_s32_224", "mobilevit_xxs",
    "mvitv2_tiny", "naflexvit_base_patch16_parfac_gap", "nextvit_small", "pit_ti_224", "pvt_v2_b0", "qwen3_vit_88m",
    "resmlp_12_224", "sam2_hiera_tiny", "samvit_base_patch16_224", "sequencer2d_s", "swiftformer_xs",
    "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224", "swinv2_tiny_window16_256", "test_convnext", "test_mambaout",
    "test_vit", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "twins_svt_small", "visformer_tiny",
    "vit_base_patch16_siglip_224", "vit_base_patch32_clip_quickgelu_224", "vit_relpos_small_patch16_224",
    "vit_tiny_patch16_224", "vit_tiny_r_s16_p8_224", "vitamin_small_224", "volo_d1_224", "xcit_nano_12_p8_224",
)  # fmt: skip
"""One of each timm family with several Linears, its smallest."""


def build_timm(name: str) -> tuple[nn.Module, Any]:
    """A timm model, its depth cut where the family has an argument for it, and an image."""
    import timm

    for cut in ({"depth": 2}, {"depths": (1, 1, 1, 1)}, {}):
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, num_classes=5, **cut)
        except Exception:  # what an unknown or unfit argument raises differs from family to family
            continue
        return model.eval(), (torch.randn(1, *model.default_cfg["input_size"]),)
    raise ValueError(f"timm has no {name}")


class Block(nn.Module):
    """A transformer block in one of several hand-written styles.

    Args:
        order: "pre", "post" or "parallel".
        packed: one Linear for queries, keys and values.
        act: the MLP's activation.
        manual: softmax written out instead of scaled_dot_product_attention.
        gated: SwiGLU.
    """

    def __init__(self, order: str = "pre", packed: bool = True, act: Callable[[], nn.Module] = nn.ReLU, manual: bool = False,
                 gated: bool = False, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:  # fmt: skip
        super().__init__()
        self.order, self.packed, self.manual, self.gated = order, packed, manual, gated
        self.ln_1, self.ln_2 = norm(48), norm(48)
        self.c_attn = nn.Linear(48, 144) if packed else nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.c_proj = nn.Linear(48, 48)
        self.up, self.act, self.down = nn.Linear(48, 96), act(), nn.Linear(96, 48)
        if gated:
            self.gate = nn.Linear(48, 96)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).split(width, -1) if self.packed else [linear(x) for linear in self.c_attn]
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in qkv)
        if self.manual:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.gate(x)) * self.up(x) if self.gated else self.act(self.up(x))
        return self.down(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "pre":
            x = x + self.attention(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        if self.order == "post":
            x = self.ln_1(x + self.attention(x))
            return self.ln_2(x + self.mlp(x))
        return x + self.attention(self.ln_1(x)) + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embedding, two blocks, norm, head."""

    def __init__(self, **style: Any) -> None:
        super().__init__()
        self.wte, self.blocks = nn.Embedding(97, 48), nn.ModuleList(Block(**style) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(48), nn.Linear(48, 97, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


STYLES: dict[str, dict[str, Any]] = {
    "gpt-relu": {},
    "gpt-erf-gelu": {"act": nn.GELU},
    "gpt-tanh-gelu": {"act": lambda: nn.GELU(approximate="tanh")},
    "gpt-unpacked": {"packed": False},
    "gpt-post-norm": {"order": "post"},
    "gpt-parallel": {"order": "parallel"},
    "gpt-manual-softmax": {"manual": True},
    "gpt-swiglu": {"act": nn.SiLU, "gated": True},
    "gpt-swiglu-rms": {"act": nn.SiLU, "gated": True, "norm": nn.RMSNorm},
    "gpt-manual-post": {"manual": True, "order": "post"},
}


def build_hand(name: str) -> tuple[nn.Module, Any]:
    """A hand-written GPT, or torch's own encoder, decoder or Transformer."""
    torch.manual_seed(0)
    if name in STYLES:
        return GPT(**STYLES[name]).eval(), (torch.randint(0, 97, (2, 9)),)
    dropout = 0.1 if name.endswith("dropout") else 0.0
    layer = {"d_model": 48, "nhead": 4, "dim_feedforward": 96, "dropout": dropout, "batch_first": True}
    x = torch.randn(2, 7, 48)
    if name.startswith("torch-encoder"):
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer, norm_first="pre" in name), 2, enable_nested_tensor=False
        ).eval(), (x,)
    return nn.Transformer(**layer, num_encoder_layers=1, num_decoder_layers=1).eval(), (x, torch.randn(2, 5, 48))


HAND = (*STYLES, "torch-encoder", "torch-encoder-pre", "torch-encoder-dropout", "torch-transformer")


DIFFUSERS = (
    "UNet2DConditionModel", "DiTTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel", "Transformer2DModel",
    "FluxTransformer2DModel",
)  # fmt: skip


def build_diffusers(name: str) -> tuple[nn.Module, Any]:
    """A tiny diffusers model (needs `pip install diffusers`) and its (args, kwargs)."""
    import diffusers

    torch.manual_seed(0)
    step, text = torch.tensor([3]), torch.randn(1, 5, 16)
    heads = {"num_attention_heads": 4, "attention_head_dim": 8}
    image = {"sample_size": 8, "in_channels": 4, "num_layers": 2, **heads}
    latent = torch.randn(1, 4, 8, 8)
    sizes: dict[str, Any] = {
        "UNet2DConditionModel": {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16, "attention_head_dim": 8, "norm_num_groups": 8,
        },
        "DiTTransformer2DModel": {**image, "out_channels": 8, "norm_num_groups": 8, "num_embeds_ada_norm": 10},
        "PixArtTransformer2DModel": {
            **image, "out_channels": 8, "norm_num_groups": 8, "cross_attention_dim": 32, "caption_channels": 16,
            "use_additional_conditions": False,
        },
        "SD3Transformer2DModel": {
            **image, "patch_size": 2, "joint_attention_dim": 16, "caption_projection_dim": 32, "pooled_projection_dim": 16,
            "out_channels": 4, "pos_embed_max_size": 16,
        },
        "Transformer2DModel": {**heads, "in_channels": 32, "num_layers": 2, "norm_num_groups": 8, "cross_attention_dim": 16},
        "FluxTransformer2DModel": {
            "patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
        },
    }  # fmt: skip
    inputs: dict[str, Any] = {
        "UNet2DConditionModel": ((latent, step, text), {}),
        "DiTTransformer2DModel": ((latent,), {"timestep": step, "class_labels": torch.tensor([1])}),
        "PixArtTransformer2DModel": (
            (latent,),
            {"encoder_hidden_states": text, "timestep": step, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        ),
        "SD3Transformer2DModel": (
            (latent,),
            {"encoder_hidden_states": text, "pooled_projections": torch.randn(1, 16), "timestep": step},
        ),
        "Transformer2DModel": ((torch.randn(1, 32, 4, 4),), {"encoder_hidden_states": text}),
        "FluxTransformer2DModel": (
            (torch.randn(1, 16, 8),),
            {
                "encoder_hidden_states": text, "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.5]),
                "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3),
            },
        ),
    }  # fmt: skip
    return getattr(diffusers, name)(**sizes[name]).eval(), inputs[name]
