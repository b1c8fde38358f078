"""Deep models: nothing searches the whole graph or the whole model once for every layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.facts.sharing import find_parents
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from te_convert.rewrite import apply as apply_module
from te_convert.rewrite import fuse as fuse_module


class Block(nn.Module):
    """Pre-norm, with an MLP that becomes one module and three readers of a norm that become another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(x)
        x = x + self.q(normed) * self.k(normed) + self.v(normed)
        return x + self.mlp(self.mlp_norm(x))


def searches(layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often planning goes through a graph, and rewriting through the model."""
    model = nn.Sequential(*(Block() for _ in range(layers))).eval()
    config = ConvertConfig(backend="reference")
    _, captured, notes = observe(model, normalize_inputs((torch.randn(2, 3, 16),)), config)
    count: Counter[str] = Counter()
    nodes: Any = fx.Graph.nodes

    def counted_nodes(graph: fx.Graph) -> Any:
        count["graph"] += 1
        return nodes.fget(graph)

    def counted_parents(root: nn.Module, find: Any = find_parents) -> Any:
        count["model"] += 1
        return find(root)

    with monkeypatch.context() as patch:
        patch.setattr(fx.Graph, "nodes", property(counted_nodes))
        patch.setattr(apply_module, "find_parents", counted_parents)
        patch.setattr(fuse_module, "find_parents", counted_parents)
        plan = make_plan(model, captured, config, notes)
        assert len(plan.fusions) == 2 * layers
        apply_module.apply_plan(model, plan, "reference")
    return count


def test_searches_do_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    few = searches(2, monkeypatch)
    assert few["graph"] > 0
    assert few["model"] > 0
    assert searches(6, monkeypatch) == few
