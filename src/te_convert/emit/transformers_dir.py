"""Models from a Transformers directory (config.json and safetensors), and from a live Transformers model."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_convert.emit.model_source import ModelSource, OpenedModel
from te_convert.emit.user_code import one_line, user_code
from te_convert.errors import EnvironmentLacksError, InputError
from te_convert.facts.attention import base_implementation
from te_convert.replacements.specs import dtype_name, torch_dtype

_COPIED = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "preprocessor*", "processor*", "spiece*")
_COPIED_ALSO = ("config.json", "generation_config.json", "chat_template*", "sentencepiece*")
_TEXTS = (".json", ".txt", ".model", ".jinja")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def open_transformers(path: Path) -> OpenedModel:
    """The model of a directory with config.json and safetensors, in the dtype of its files.

    Raises:
        InputError: damaged files, weights in a pickle, missing weights, an unknown architecture, or code in the directory.
        EnvironmentLacksError: Transformers is not installed.
    """
    config = _read_config(path)
    _check_weights(path)
    transformers = _transformers()
    cls = _architecture(transformers, config, path)
    with user_code(), _no_bar_in_logs(transformers):
        model = _load(cls, transformers, path)
    files = _copied_files(path)
    return OpenedModel(model, None, _source(model, files, tuple(path.resolve() / name for name in (*files, *_WEIGHTS))))


def open_outline(path: Path, build: AbstractContextManager[Any]) -> OpenedModel:
    """The model of a directory as its config describes it, built inside ``build``; the weights are not read.

    Raises:
        InputError: a damaged config, an unknown architecture, or code in the directory.
        EnvironmentLacksError: Transformers is not installed.
    """
    config = _read_config(path)
    transformers = _transformers()
    cls = _architecture(transformers, config, path)
    if cls is transformers.AutoModel:
        raise InputError(f"{path / 'config.json'} names no architecture", 'add "architectures": [the class of the weights] to it')
    kept = _copied_files(path)
    dtype = config.get("dtype", config.get("torch_dtype"))
    source = ModelSource("transformers", cls.__name__, "config.json", dtype=dtype if isinstance(dtype, str) else "")
    with build:
        model = tied(rebuild_transformers(source, path))
    return OpenedModel(model, None, _source(model, kept, tuple(path.resolve().iterdir())))


def source_of_transformers(model: nn.Module) -> ModelSource | None:
    """The source of a live model of a class that Transformers itself has; None for any other model."""
    cls = type(model)
    if not cls.__module__.startswith("transformers."):
        return None
    transformers = _transformers()
    if not isinstance(model, transformers.PreTrainedModel) or getattr(transformers, cls.__name__, None) is not cls:
        return None
    config = copy.deepcopy(model.config)
    config.architectures = [cls.__name__]
    files = {"config.json": config.to_json_string().encode()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return _source(model, files, ())


def rebuild_transformers(source: ModelSource, directory: Path) -> nn.Module:
    """Build the model from the copied config; its parameters are not initialised.

    Raises:
        InputError: the config or the architecture cannot be used.
        EnvironmentLacksError: Transformers is not installed.
    """
    transformers = _transformers()
    cls = _class(transformers, source.entry)
    try:
        with user_code(), _no_init():
            config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
            keyword = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            options: dict[str, Any] = {keyword: torch_dtype(source.dtype)} if source.dtype else {}
            if source.attention:
                options["attn_implementation"] = source.attention
            model: nn.Module = cls._from_config(config, **options)
            if (directory / "generation_config.json").is_file() and hasattr(model, "generation_config"):
                generation = transformers.GenerationConfig.from_pretrained(str(directory), local_files_only=True)
                model.generation_config = generation
    except Exception as error:
        raise InputError(f"{source.entry} from config.json: {type(error).__name__}: {one_line(error)}", _VERSION_HINT) from error
    return model.eval()


def build_from_config(cls: type[nn.Module], config: Any) -> nn.Module:
    """A model of a Transformers class, its parameters not initialised, in the config's dtype and attention implementation.

    Raises:
        Exception: what the class raises on such a config.
    """
    keyword = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    options: dict[str, Any] = {keyword: getattr(config, keyword)} if getattr(config, keyword, None) is not None else {}
    with user_code(), _no_init():
        build: Any = cls
        model: nn.Module = build._from_config(config, **options)
    return tied(model.eval())


def tied(model: nn.Module) -> nn.Module:
    """Ties made, which building without initialisation leaves out."""
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    return model


_VERSION_HINT = "use the Transformers version that manifest.json names"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentLacksError(f"Transformers cannot be imported: {one_line(error)}", "pip install transformers") from error
    return transformers


@contextmanager
def _no_bar_in_logs(transformers: Any) -> Iterator[None]:
    """Transformers' progress bar switched off where stderr is no terminal."""
    logging = transformers.utils.logging
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _no_init() -> AbstractContextManager[Any]:
    """Random initialisation switched off where this version of Transformers can."""
    for name in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            module = __import__(name, fromlist=["no_init_weights"])
        except ImportError:
            continue
        if hasattr(module, "no_init_weights"):
            context: AbstractContextManager[Any] = module.no_init_weights()
            return context
    return nullcontext()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path / 'config.json'} cannot be read: {one_line(error)}", "download the model again") from error
    if not isinstance(config, dict):
        raise InputError(f"{path / 'config.json'} is no JSON object", "give a Transformers directory")
    return config


def _check_weights(path: Path) -> None:
    if any((path / name).is_file() for name in _WEIGHTS):
        return
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise InputError(
            f"{path} holds its weights in a pickle ({pickles[0]}), which is not read",
            "save it again with save_pretrained, or convert with --stream, which reads tensors only",
        )
    raise InputError(f"{path} has config.json but no model.safetensors", "download the weights, or give file.py with build_model()")


def _architecture(transformers: Any, config: dict[str, Any], path: Path) -> Any:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is None and not config.get("auto_map"):
        return transformers.AutoModel
    if name is not None and hasattr(transformers, str(name)):
        return _class(transformers, str(name))
    if config.get("auto_map"):
        raise InputError(
            f"{path} needs Python code from the directory ({name or 'auto_map'}), which is not run",
            "import the class in a file.py of your own with build_model(), and convert that",
        )
    return _class(transformers, str(name))


def _class(transformers: Any, name: str) -> Any:
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise InputError(f"Transformers {transformers.__version__} has no model class {name!r}", "install a version that has it")
    return cls


def _load(cls: Any, transformers: Any, path: Path) -> nn.Module:
    keyword = "dtype" if hasattr(transformers.PretrainedConfig(), "dtype") else "torch_dtype"
    try:
        model, info = cls.from_pretrained(
            str(path), local_files_only=True, use_safetensors=True, output_loading_info=True, **{keyword: "auto"}
        )
    except Exception as error:
        message = f"{path} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        raise InputError(message, "load it with Transformers to see the whole error") from error
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            message = f"{path}: {len(keys)} weights of {type(model).__name__} are {kind.split('_')[0]}: {', '.join(keys[:8])}"
            raise InputError(message, "set architectures in config.json to the class whose weights these are")
    module: nn.Module = model
    return module


def _copied_files(path: Path) -> dict[str, bytes]:
    files = {file for pattern in (*_COPIED, *_COPIED_ALSO) for file in path.glob(pattern)}
    kept = sorted(file for file in files if file.is_file() and file.suffix in _TEXTS)
    return {file.name: file.read_bytes() for file in kept}


def _source(model: nn.Module, files: dict[str, bytes], origins: tuple[Path, ...]) -> ModelSource:
    dtype: Any = getattr(model, "dtype", None)
    return ModelSource(
        kind="transformers",
        entry=type(model).__name__,
        main="config.json",
        files=tuple(files),
        dtype=dtype_name(dtype) if isinstance(dtype, torch.dtype) else "",
        attention=base_implementation(str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")),
        content=files,
        origins=origins,
    )
