"""Inputs for a Transformers model that came with none: its signature names them, its config gives their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from te_convert.capture.made_inputs import BATCH, LENGTH, floats, ids

_SOURCE = "the Transformers config"
_FRAMES = 64  # of audio features: divisible by the subsampling of every speech encoder
_SAMPLES = 15360  # of audio: a whole number of 1920-sample frames, the longest that a codec asks for
_GRID = (1, 4, 4)  # patches of an image (time, height, width): divisible by merge sizes 2 and 4
_MELS = ("num_mel_bins", "feature_size", "num_mel_channels", "input_feat_size", "input_dim", "n_mels", "num_features")


def transformers_candidates(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keyword arguments to try, the likeliest first.

    The main input alone comes first, then everything that the forward requires, then combinations that models of several
    modalities take.  A name that nothing is known about leaves its combination out.
    """
    makers = _Makers(model)
    forward = inspect.signature(model.forward).parameters
    required = [name for name, p in forward.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = model.main_input_name if isinstance(model.main_input_name, str) else next(iter(required), "input_ids")
    for names in _combinations(main, required, set(forward)):
        for style in _styles(names):
            made = makers.make(names, style)
            if made is not None:
                yield _SOURCE, made


def _combinations(main: str, required: Sequence[str], known: set[str]) -> Iterator[list[str]]:
    """Sets of argument names: the main input with more and more of what may belong to it."""
    seen: set[tuple[str, ...]] = set()
    base = [main] if main in known and main not in required else []
    options: list[list[str]] = [
        [main],
        [*base, *required],
        [main, "input_ids"],
        [main, "decoder_input_ids"],
        [*base, *required, "decoder_input_ids"],
        [*base, *required, "encoder_hidden_states"],
        [*base, *required, "input_features_mask"],
        ["input_ids"],
        ["input_ids", "decoder_input_ids"],
        ["input_ids", "bbox"],
        ["input_ids", "pixel_values"],
        ["input_ids", "pixel_values", "attention_mask"],
        ["input_ids", "pixel_values", "image_embeds_position_mask"],
        ["input_ids", "visual_feats", "visual_pos"],
        ["input_ids", "input_features", "attention_mask"],
        [*base, *required, "target_sizes"],
    ]
    for names in options:
        unique = tuple(dict.fromkeys(names))
        extra = [name for name in unique if name not in known and name not in required and name != main]
        if unique not in seen and not extra:
            seen.add(unique)
            yield list(unique)


def _styles(names: Sequence[str]) -> tuple[str, ...]:
    """Layouts that a name alone does not tell."""
    if "input_features" in names or "audio_mel" in names:
        return ("channels first", "channels last", "encoder positions")
    if "input_values" in names:
        return ("batch", "channel", "features")
    if "pixel_values" in names:
        return ("image", "large image", "pair", "video")
    return ("only",)


def config_value(config: Any, *names: str, default: int) -> int:
    """The first of the names that the config or one of its parts has as a positive number (or a pair of them)."""
    parts = [getattr(config, part, None) for part in ("vision_config", "audio_config", "encoder_config", "text_config")]
    for holder in (config, *parts):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (tuple, list)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


@dataclass(frozen=True)
class _Makers:
    """Values for argument names; ``style`` picks one of several layouts."""

    model: nn.Module

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    def make(self, names: Sequence[str], style: str) -> dict[str, Any] | None:
        """A value for each name, or None when one is not known."""
        grids = any(name in ("grid_thw", "image_grid_thw") for name in names)
        makers: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("input_ids", "decoder_input_ids", "qformer_input_ids", "task_inputs"), self.ids),
            **dict.fromkeys(("attention_mask", "decoder_attention_mask"), lambda: torch.ones(BATCH, LENGTH, dtype=torch.long)),
            "input_features_mask": lambda: torch.ones(BATCH, _FRAMES, dtype=torch.bool),
            "audio_mel_mask": lambda: torch.zeros(BATCH, _FRAMES, dtype=torch.bool),
            "image_embeds_position_mask": lambda: torch.zeros(BATCH, LENGTH, dtype=torch.bool),
            "pixel_values": self.patches if grids else lambda: self.image(style),
            "hidden_states": self.patches if grids else self.hidden,
            **dict.fromkeys(("inputs_embeds", "query_embeds", "encoder_hidden_states", "noise_embeds"), self.hidden),
            **dict.fromkeys(("grid_thw", "image_grid_thw"), lambda: torch.tensor([_GRID] * BATCH)),
            **dict.fromkeys(("input_features", "audio_mel"), lambda: self.features(style)),
            "input_values": lambda: self.audio(style),
            "bbox": self.boxes,
            "past_values": self.series,
            "visual_feats": lambda: self.floats(BATCH, 3, self.size("visual_feat_dim", default=2048)),
            "visual_pos": lambda: self.floats(BATCH, 3, 4).sigmoid(),
            "pixel_position_ids": lambda: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1),
            "target_sizes": lambda: torch.tensor([[4, 4]] * BATCH),
        }
        if any(name not in makers for name in names):
            return None
        return {name: makers[name]() for name in names}

    def size(self, *names: str, default: int) -> int:
        return config_value(self.config, *names, default=default)

    def floats(self, *shape: int) -> torch.Tensor:
        return floats(self.model, *shape)

    def ids(self) -> torch.Tensor:
        return ids(min(self.size("vocab_size", default=32), 1000))

    def hidden(self) -> torch.Tensor:
        return self.floats(BATCH, LENGTH, self.size("hidden_size", "d_model", default=64))

    def image(self, style: str) -> torch.Tensor:
        channels = self.size("num_channels", "in_channels", default=3)
        size = self.config.image_size if hasattr(self.config, "image_size") else None
        height = self.size("image_size", default=224)
        width = size[1] if isinstance(size, (tuple, list)) and len(size) == 2 else height
        if style == "large image":
            height = width = 224
        extra = {"pair": (2,), "video": (4,)}.get(style, ())
        return self.floats(BATCH, *extra, channels, height, width)

    def patches(self) -> torch.Tensor:
        """Flattened patches of one grid for each of the batch: ``[patches, channels · time · height · width]``."""
        patch = self.size("patch_size", default=14)
        width = self.size("in_channels", "num_channels", "in_chans", default=3) * self.size("temporal_patch_size", default=1)
        return self.floats(BATCH * _GRID[0] * _GRID[1] * _GRID[2], width * patch * patch)

    def features(self, style: str) -> torch.Tensor:
        mels = self.size(*_MELS, default=80)
        if style == "encoder positions":  # Whisper's encoder takes exactly twice its positions
            return self.floats(BATCH, mels, 2 * self.size("max_source_positions", default=8))
        shape = (mels, _FRAMES) if style == "channels first" else (_FRAMES, mels)
        return self.floats(BATCH, *shape)

    def audio(self, style: str) -> torch.Tensor:
        if style == "features":  # spectrogram transformers call their spectrogram this
            return self.floats(BATCH, self.size("max_length", default=1024), self.size(*_MELS, default=128))
        return self.floats(BATCH, *((1,) if style == "channel" else ()), _SAMPLES)

    def boxes(self) -> torch.Tensor:
        """Boxes of words, sorted corners, as integers up to 1000 (LayoutLM) or as fractions (BROS)."""
        corners = torch.tensor([10, 20, 30, 40]).expand(BATCH, LENGTH, 4)
        return corners / 100 if getattr(self.config, "model_type", "") == "bros" else corners

    def series(self) -> torch.Tensor:
        return self.floats(BATCH, self.size("context_length", default=32), self.size("num_input_channels", default=1))
