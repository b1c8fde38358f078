"""Training after conversion: gradients, checkpointing, LoRA, Trainer, DDP, autocast."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import te_convert
from tests.integration.language_models import DECODERS, assert_same_gradients, build, converted, gradients, ids

PEFT_CALLS_OLD_NAMES = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_are_the_originals(name: str) -> None:
    model = build(name)
    twin = converted(model)
    batch = ids()
    for each in (model, twin):
        loss_of(each, batch).backward()
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.report("NVIDIA/TransformerEngine#415", "NVIDIA/TransformerEngine#776")
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = build(name, **({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}))
    twin = converted(model)
    batch = ids()
    loss_of(model, batch).backward()
    twin.train()
    enable = getattr(twin, "activation_checkpointing_enable", None) or twin.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    loss_of(twin, batch).backward()
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.report("NVIDIA/TransformerEngine#764")
def test_a_few_optimizer_steps_give_the_same_losses() -> None:
    model = build("llama")
    twin = converted(model)
    losses = []
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        found = []
        for step in range(4):
            loss = loss_of(each, ids(2, 8 + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@PEFT_CALLS_OLD_NAMES
@pytest.mark.report("NVIDIA-NeMo/Automodel#1011", "huggingface/peft#3048", "pytorch/torchtune#2833")
def test_lora_before_conversion() -> None:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config).eval()
    twin, report = te_convert.convert(model, {"input_ids": ids()})
    assert report.parity.passed
    batch = ids(2, 6)
    for each in (model, twin):
        loss_of(each, batch).backward()
    assert_same_gradients(gradients(model), gradients(twin))


@PEFT_CALLS_OLD_NAMES
@pytest.mark.report("NVIDIA-NeMo/Automodel#1011", "huggingface/peft#3048", "pytorch/torchtune#2833")
def test_lora_after_conversion() -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = build("llama")
    twin = converted(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config).eval()
    torch.manual_seed(0)
    adapted_twin = peft.get_peft_model(twin, config).eval()
    batch = ids(2, 6)
    losses = [loss_of(each, batch) for each in (adapted, adapted_twin)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-5)
    for loss in losses:
        loss.backward()
    lora = [
        {n: p.grad for n, p in each.named_parameters() if "lora_" in n and p.grad is not None} for each in (adapted, adapted_twin)
    ]
    assert lora[0].keys() == lora[1].keys()
    for name, gradient in lora[0].items():
        assert torch.allclose(gradient, lora[1][name], rtol=1e-4, atol=1e-7), name


def test_two_steps_of_the_trainer(tmp_path: Path) -> None:
    import transformers

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = ids(8, 6)[index]
            return {"input_ids": row, "labels": row}

    model = build("llama")
    twin = converted(model)
    losses = []
    for each in (model, twin):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
            logging_steps=1, disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = transformers.Trainer(model=each, args=arguments, train_dataset=Rows())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_ddp_on_gloo(tmp_path: Path) -> None:
    model = build("llama")
    twin = converted(model)
    batch = ids()
    loss_of(model, batch).backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(twin)
        loss_of(wrapped, batch).backward()
    finally:
        dist.destroy_process_group()
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_autocast_is_as_accurate_as_the_originals(name: str) -> None:
    model = build(name)
    twin = converted(model)
    batch = ids(2, 12)
    with torch.no_grad():
        exact = model(batch).logits
        with torch.autocast("cpu", torch.bfloat16):
            errors = [(each(batch).logits.float() - exact).norm() for each in (model, twin)]
    assert errors[1] <= 1.25 * errors[0]


def test_deepcopy_trains_alone() -> None:
    twin = converted(build("llama"))
    clone = copy.deepcopy(twin)
    before = te_convert.original_state_dict(twin)
    before = {name: tensor.clone() for name, tensor in before.items()}
    optimizer = torch.optim.SGD(clone.parameters(), lr=0.1)
    loss_of(clone, ids()).backward()
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in te_convert.original_state_dict(twin).items())
    changed = te_convert.original_state_dict(clone)
    assert not torch.equal(changed["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"])
