"""Small models as source files, with plans and reports for them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from te_convert.emit.model_source import OpenedModel
from te_convert.emit.sources import open_source
from te_convert.emit.write import write_directory
from te_convert.plan.model import Decision, Outcome, Plan
from te_convert.replacements.specs import LayerNormSpec, LinearSpec, dtype_name
from te_convert.report.model import Coverage, Report
from te_convert.rewrite.apply import apply_plan
from te_convert.verify.model import Figures, Parity, ScenarioParity
from te_convert.weights.ops import Fill, Move, WeightMap

PLAIN = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8, bias=False)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("random", torch.rand(8), persistent=False)

    def forward(self, ids):
        return self.head(self.fc(self.norm(self.embed(ids) * self.scale + self.random)))


def build_model():
    return Net()


def example_inputs():
    return (torch.arange(11).reshape(1, 11),)
"""


def write_source(folder: Path, text: str = PLAIN, name: str = "net.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def plan_for(model: nn.Module) -> Plan:
    """Every Linear and LayerNorm converts."""
    return Plan(type(model).__name__, tuple(d for name, module in model.named_modules() if (d := _decision(name, module))))


def _decision(name: str, module: nn.Module) -> Decision | None:
    if type(module) is nn.Linear:
        has_bias = "bias" in dict(module.named_parameters())
        spec = LinearSpec(module.in_features, module.out_features, has_bias, dtype_name(module.weight.dtype))
        names = ("weight", "bias") if has_bias else ("weight",)
        weights = WeightMap(tuple(Move(key, key) for key in names))
        return Decision(name, "Linear", "Linear", Outcome.CONVERTED, spec=spec, weights=weights)
    if type(module) is nn.LayerNorm:
        width = module.normalized_shape[0]
        norm = LayerNormSpec(width, module.eps, zero_centered_gamma=False, dtype=dtype_name(module.weight.dtype))
        bias = Fill("bias", 0.0, width) if "bias" not in dict(module.named_parameters()) else Move("bias", "bias")
        weights = WeightMap((Move("weight", "weight"), bias))
        return Decision(name, "LayerNorm", "LayerNorm", Outcome.CONVERTED, spec=norm, weights=weights)
    return None


def report_for(plan: Plan) -> Report:
    figures = Figures(float("inf"), 0.0, bit_equal=True, numel=1)
    scenario = ScenarioParity("inputs", "float32", True, figures, None, "at least 90 dB", passed=True)
    parity = Parity("passed", "reference", scenarios=(scenario,))
    coverage = Coverage(0, 0, 0, 0, 0, 0)
    return Report(plan.model_class, bool(plan.converting), (), parity, coverage, None, "reference", "asked for")


def convert_file(path: Path, out: Path, **options: bool | int) -> tuple[nn.Module, OpenedModel]:
    """Open, convert and write; the converted model and what was opened."""
    opened = open_source(str(path))
    return convert_opened(opened, out, **options), opened


def convert_opened(opened: OpenedModel, out: Path, **options: bool | int) -> nn.Module:
    plan = plan_for(opened.model)
    model = apply_plan(opened.model, plan, "reference").model
    write_directory(model, plan, report_for(plan), opened.source, out, **options)  # type: ignore[arg-type]
    return model
