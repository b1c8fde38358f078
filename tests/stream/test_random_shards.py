"""Any tensors over any shards, rearranged by any weight program into any shards: the way back gives them again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from te_convert.emit.tensors_file import name_shards, plan_shards
from te_convert.emit.write import index_json
from te_convert.stream.checkpoint import open_checkpoint
from te_convert.stream.ledger import LEDGER, read_ledger, write_ledger
from te_convert.stream.pieces import Layout, invert, pieces_of
from te_convert.stream.staging import Staging
from te_convert.stream.writer import ShardWriter
from te_convert.weights.ops import Concat, Move, Rows, SwapHalves, Take, Transpose, WeightOp
from tests.stream.stream_samples import tensors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
Made = list[WeightOp]
SIZES = st.integers(1, 9)


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Made]:
    """Tensors and the operations that use each element of them once."""
    state: dict[str, torch.Tensor] = {}
    made: Made = []

    def tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
        name = f"source.{len(state)}"
        bits = torch.randint(0, 100, tuple(shape), generator=torch.Generator().manual_seed(len(state)))
        state[name] = bits.to(dtype)
        return name

    for number in range(draw(st.integers(1, 5))):
        dtype, dest = draw(st.sampled_from(DTYPES)), f"dest.{number}"
        rows, columns = draw(SIZES), draw(SIZES)
        kind = draw(st.sampled_from(["move", "transpose", "concat", "swap", "take", "rows"]))
        turned = draw(st.booleans())
        if kind == "move":
            shape = draw(st.lists(st.integers(0, 5), max_size=3))
            made.append(Move(tensor(shape, dtype), dest))
        elif kind == "transpose":
            made.append(Transpose(tensor((rows, columns), dtype), dest))
        elif kind == "concat":
            blocks = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
            names = tuple(tensor((columns, b) if turned else (b, columns), dtype) for b in blocks)
            made.append(Concat(names, dest, blocks, turned))
        elif kind == "swap":
            made.append(SwapHalves(tensor((rows, columns), dtype), dest, turned))
        elif kind == "take":
            name = tensor((rows, columns, 2), dtype)
            made += [Take(name, f"{dest}.{index}", index, rows) for index in range(rows)]
        else:
            name = tensor((rows, columns), dtype)
            cut = draw(st.integers(0, rows))
            parts = [(0, cut), (cut, rows - cut)]
            made += [Rows(name, f"{dest}.{start}", start, count, rows) for start, count in parts if count]
    return state, made


def _save(state: dict[str, torch.Tensor], places: Sequence[int], folder: Path) -> None:
    files = {name: f"part-{place}.safetensors" for name, place in zip(state, places, strict=True)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _stream(source: Path, out: Path, layouts: dict[str, Layout], shard_bytes: int) -> None:
    """Write the layouts as a sharded directory with its ledger."""
    sizes = {name: layout.size for name, layout in layouts.items()}
    shards = name_shards(plan_shards(sizes, shard_bytes))
    with closing(open_checkpoint(source)) as checkpoint, Staging(out, {}, resume=False).locked() as staging:
        records = ShardWriter(staging, checkpoint, lambda *_: None, sum(sizes.values())).write(shards, layouts)
        if len(shards) > 1:
            index = index_json({name: file for file, names in shards for name in names}, sum(sizes.values()))
            (staging.path / "model.safetensors.index.json").write_text(index)
        (staging.path / LEDGER).write_text(write_ledger(layouts, checkpoint.entries, records))
        staging.path.rename(out)


@settings(max_examples=40, deadline=None)
@given(program=programs(), data=st.data(), shard_bytes=st.integers(1, 600), back_bytes=st.integers(1, 600))
def test_any_checkpoint_comes_back(
    program: tuple[dict[str, torch.Tensor], Made], data: st.DataObject, shard_bytes: int, back_bytes: int
) -> None:
    state, ops = program
    places = data.draw(st.lists(st.integers(0, 3), min_size=len(state), max_size=len(state)))
    made, expected = {}, {}
    for op in ops:
        expected[op.dest] = op.forward([state[name] for name in op.sources])
        pieces = pieces_of(op, op.sources, lambda name: tuple(state[name].shape))
        made[op.dest] = Layout(expected[op.dest].dtype, tuple(expected[op.dest].shape), pieces)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "hf").mkdir()
        _save(state, places, root / "hf")
        _stream(root / "hf", root / "te", made, shard_bytes)
        found = tensors(root / "te")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())
        with closing(open_checkpoint(root / "te")) as checkpoint:
            layouts = invert(*read_ledger(root / "te" / LEDGER, checkpoint))
        _stream(root / "te", root / "back", layouts, back_bytes)
        back = tensors(root / "back")
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items())
