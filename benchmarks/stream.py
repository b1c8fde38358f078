"""Stream a generated Llama-shaped bf16 checkpoint into TE's layout: bytes per second against cp, and peak memory.

    python benchmarks/stream.py                    # 2 and 8 GB
    python benchmarks/stream.py --gb 2 --folder /disk

Each conversion runs in a process of its own, so that its peak memory is its own; cp copies the same files on the same disk and
syncs them, as the conversion does.  One run, ratios only: disks are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, INNER, VOCABULARY = 4096, 11008, 32000
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH)


def generate(folder: Path, gigabytes: float) -> int:
    """Write config.json and shards of random bf16 weights; the number of layers."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    layers = max(1, round((gigabytes * 1e9 - 4 * WIDTH * VOCABULARY) / LAYER_BYTES))
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}

    def write(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        file = f"model-{number:05d}.safetensors"
        tensors = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    outer = (VOCABULARY, WIDTH)
    write(0, {"model.embed_tokens.weight": outer, "lm_head.weight": outer, "model.norm.weight": (WIDTH,)})
    for layer in range(layers):
        head = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {f"{head}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{head}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{head}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        write(layer + 1, {**shapes, f"{head}mlp.down_proj.weight": (WIDTH, INNER)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return layers


def copy(source: Path, target: Path) -> float:
    """Seconds that cp and a sync of the copied files take."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - start


def convert(source: Path, target: Path, verify: bool) -> dict[str, Any]:
    """Convert in a process of its own: its timings and peak memory."""
    command = [sys.executable, __file__, "--child", source, target, *([] if verify else ["--no-verify"])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(source: Path, target: Path, verify: bool) -> None:
    """The conversion alone."""
    import te_convert

    start = time.perf_counter()
    result = te_convert.convert_checkpoint(source, target, verify=verify)
    # Not ru_maxrss: a process starts with that of its parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "peak_gb": peak / 1e9,
                "parity": result.report.parity.status,
                **{f"{stage}_s": seconds for stage, seconds in result.report.timings_s.items()},
            }
        )
    )


def main() -> None:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="*", default=[2.0, 8.0])
    parser.add_argument("--folder", type=Path, help="where to write; three times the size is needed")
    parser.add_argument("--child", type=Path, nargs=2)
    parser.add_argument("--no-verify", action="store_true")
    options = parser.parse_args()
    if options.child:
        child(*options.child, verify=not options.no_verify)
        return
    for gigabytes in options.gb:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            layers = generate(folder / "source", gigabytes)
            size = sum(file.stat().st_size for file in (folder / "source").iterdir())
            copied = [copy(folder / "source", folder / "copy")]
            shutil.rmtree(folder / "copy")
            plain = convert(folder / "source", folder / "converted", verify=False)
            copied.append(copy(folder / "source", folder / "copy"))
            shutil.rmtree(folder / "copy")
            shutil.rmtree(folder / "converted")
            checked = convert(folder / "source", folder / "converted", verify=True)
            seconds = sum(copied) / len(copied)
            print(
                f"{size / 1e9:.2f} GB, {layers} layers: cp {size / seconds / 1e6:.0f} MB/s, "
                f"streamed {size / plain['stream_s'] / 1e6:.0f} MB/s ({seconds / plain['stream_s']:.2f} of cp), "
                f"peak {plain['peak_gb']:.2f} GB; with verification {checked['seconds']:.0f} s in all, "
                f"peak {checked['peak_gb']:.2f} GB, parity {checked['parity']}"
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
