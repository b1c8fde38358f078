"""A Vision Transformer of timm, with random weights: nothing is downloaded."""

from __future__ import annotations

import torch
from torch import nn

NAME = "vit_tiny_patch16_224"


def build_model() -> nn.Module:
    """The same weights each time."""
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(NAME, pretrained=False)
    # timm starts the output layer near zero, which makes all classes alike.
    nn.init.normal_(model.get_parameter("head.weight"), std=0.05)
    return model.eval()


def synthetic_image() -> torch.Tensor:
    """Coloured rings on a gradient, in the value range of a normalised image."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
    radius = (x**2 + y**2).sqrt()
    return torch.stack([torch.sin(12 * radius), torch.cos(9 * radius) * x, y]).unsqueeze(0)


def example_inputs() -> tuple[torch.Tensor]:
    """What te-convert runs the model on."""
    return (synthetic_image(),)
