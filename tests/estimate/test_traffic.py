from __future__ import annotations

import torch
from torch import Tensor, nn

from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.estimate.traffic import find_eager_attention, find_rest
from te_convert.estimate.work import Work
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from tests.estimate.models import Attention, Block, tokens


def _rest(model: nn.Module, inputs: Tensor) -> dict[str, Work]:
    _, captured, notes = observe(model, normalize_inputs(inputs), ConvertConfig())
    plan = make_plan(model, captured, ConvertConfig(), notes)
    return {work.fqn: work for work in find_rest(model, captured.recordings[0], plan)}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(64, 64), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x).view(-1, 64)) + 1.0  # type: ignore[no-any-return]


def test_bytes_of_element_wise_work_outside_of_sites() -> None:
    (rest,) = _rest(Plain(), torch.randn(2, 8, 64)).values()
    assert rest.moved_bytes == 2 * (2 * 16 * 64 * 4)  # the activation and the sum read and write; the view moves nothing
    assert (rest.kernels, rest.other_flops, rest.converted) == (2, 0, False)


def test_a_fused_mlp_and_attention_account_for_their_own() -> None:
    rest = _rest(Block(), tokens())
    assert (rest["(rest of the root)"].kernels, rest["(rest of scale)"].kernels) == (2, 1)  # two sums and a product
    for left in (rest, _rest(Attention(64, 4, True), tokens())):
        assert sum(work.kernels for work in left.values()) <= 4  # and the copy of a transposed tensor
        assert sum(work.other_flops for work in left.values()) == 0


def test_nothing_is_left_of_a_whole_layer() -> None:
    assert not _rest(Block(scaled=False, eager=True), tokens())


def test_softmax_gives_written_attention_away() -> None:
    for eager in (False, True):
        _, captured, _ = observe(Block(eager=eager), normalize_inputs(tokens()), ConvertConfig())
        assert bool(find_eager_attention(captured.recordings[0])) is eager
