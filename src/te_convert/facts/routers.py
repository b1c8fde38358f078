"""How a mixture chooses experts: from the router's logits to expert indices and weights."""

from __future__ import annotations

from torch import Tensor

_FORMS = ("softmax-topk-normalize", "softmax-topk", "topk-softmax")
_FLOAT32 = "/float32"
ROUTERS = tuple(form + where for form in _FORMS for where in ("", _FLOAT32))
"""Known routers; those that end in ``/float32`` compute in float32 whatever the dtype of the logits is."""


def route(logits: Tensor, router: str, top_k: int) -> tuple[Tensor, Tensor]:
    """Expert weights and indices of each token.

    Args:
        logits: [tokens, experts].
        router: name in ROUTERS.
        top_k: experts of a token.

    Returns:
        Weights [tokens, top_k] in the dtype of the logits, or float32, and indices int64 [tokens, top_k].
    """
    if router.endswith(_FLOAT32):
        router, logits = router.removesuffix(_FLOAT32), logits.float()
    if router == "topk-softmax":
        values, index = logits.topk(top_k, dim=-1)
        return values.softmax(dim=-1), index
    weights, index = logits.softmax(dim=-1).topk(top_k, dim=-1)
    if router == "softmax-topk-normalize":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, index


def top_ks(experts: int, numbers: set[int]) -> list[int]:
    """Which of some numbers can be a top_k, and 1 and 2: of more than eight experts, no more than half are chosen."""
    most = experts if experts <= 8 else experts // 2
    return sorted(number for number in {1, 2, *numbers} if 1 <= number <= most)


def mix(weights: Tensor, index: Tensor, ranking: Tensor, outputs: Tensor) -> Tensor:
    """``sum_k weights[t, k] * expert_e(x[t])`` with ``e = index[t, k]``.

    Args:
        weights: [tokens, top_k].
        index: [tokens, top_k].
        ranking: [tokens, n], the experts whose outputs are known; those of ``index`` are among them.
        outputs: [tokens, n, hidden].

    Returns:
        [tokens, hidden] in the dtype of ``outputs``.
    """
    place = (ranking.unsqueeze(1) == index.unsqueeze(2)).long().argmax(dim=-1)
    chosen = outputs.gather(1, place.unsqueeze(-1).expand(-1, -1, outputs.shape[-1]))
    return (chosen * weights.to(outputs.dtype).unsqueeze(-1)).sum(dim=1)
