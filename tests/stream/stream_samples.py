"""Small Transformers directories, sharded, with norms and biases away from their defaults."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        **options,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=32, **special))
    return model


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=3,
        dtype="bfloat16",
    )
    model: nn.Module = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)  # buffers stay float32
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "gpt2": _gpt2,
    "mixtral": _mixtral,
}


def build(name: str) -> nn.Module:
    """The model in eval mode."""
    torch.manual_seed(3)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(name: str, folder: Path, shard: str = "20KB") -> nn.Module:
    """Save the model as a sharded directory."""
    model: Any = build(name)
    model.save_pretrained(folder, max_shard_size=shard)
    return model  # type: ignore[no-any-return]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a directory."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def tokens() -> torch.Tensor:
    """int64 [2, 12]."""
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


_STOPS = """
import sys, time
from te_convert.cli.main import main
from te_convert.stream.writer import ShardWriter
from {module} import {function}

{function}.__kwdefaults__["shard_bytes"] = {shard}
read, calls = ShardWriter._chunks, []


def slow(self, *args):
    calls.append(1)
    if len(calls) == 25:
        print("now", file=sys.__stdout__, flush=True)
        time.sleep(600)
    yield from read(self, *args)


ShardWriter._chunks = slow
main()
"""


def run_and_kill(function: Any, shard: int, arguments: list[str]) -> None:
    """Run the command line with ``function`` writing shards of so many bytes, and end it with kill -9 in the 25th piece."""
    code = _STOPS.format(module=function.__module__, function=function.__name__, shard=shard)
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)


def finished(out: Path) -> dict[str, int]:
    """Shards of an unfinished run and their inodes: one that was written anew has another."""
    files = (out.parent / f".{out.name}.partial" / "files").iterdir()
    return {file.name: file.stat().st_ino for file in files if file.suffix == ".safetensors"}


def inodes(folder: Path, names: dict[str, int]) -> dict[str, int]:
    """Those of some files of a directory."""
    return {name: (folder / name).stat().st_ino for name in names}


def failing_reads(healthy: int, told: list[str]) -> Callable[[int, Any, int], int]:
    """``os.preadv`` on a disk that gives little at a time and fails after so many bytes; ``told`` gets what is to be said of it."""
    read, seen = os.preadv, [0]

    def preadv(handle: int, buffers: Any, offset: int) -> int:
        if seen[0] >= healthy:
            file = Path(f"/proc/self/fd/{handle}").readlink()
            told.append(f"{file} cannot be read at offset {offset}: Input/output error")
            raise OSError(errno.EIO, "Input/output error")
        got = read(handle, [buffers[0][:1000]], offset)
        seen[0] += got
        return got

    return preadv
