"""Running the model's own source: stdout kept clean, imports kept apart, failures told in one line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_INSTALLED = ("site-packages", "dist-packages")
# Re-importing one of these would give the process two copies of a library with C state, or of this package.
_NEVER_HIDDEN = frozenset(sys.stdlib_module_names) | {
    "__main__",
    "numpy",
    "te_convert",
    "torch",
    "transformer_engine",
    "transformers",
}


def one_line(text: object, limit: int = 400) -> str:
    """The text with all runs of white space as one space, cut at ``limit`` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


class SourceOnlyLoader(SourceFileLoader):
    """Compiles the source each time: reads no ``.pyc`` (which nothing checks) and leaves none behind."""

    def get_code(self, fullname: str) -> CodeType:
        """The compiled source file."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _DirectoryFinder(MetaPathFinder):
    """Finds modules in one directory and below it before anything else, as ``python file.py`` would."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a source file of the directory, or None."""
        entries = [self.directory] if path is None else [entry for entry in path if _is_below(entry, self.directory)]
        for entry in entries:
            spec = FileFinder(entry, (SourceOnlyLoader, [".py"])).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


def _is_below(entry: str, directory: str) -> bool:
    return entry == directory or entry.startswith(directory.rstrip("/\\") + "/")


def is_installed(path: Path) -> bool:
    """True for a file that a package installer put there."""
    return any(part in _INSTALLED for part in path.parts)


@contextmanager
def user_code(directory: Path | None = None, argv: str = "", isolate: bool = True) -> Iterator[None]:
    """While the block runs, the model's source is being executed.

    Its prints go to stderr, ``sys.argv`` holds only the file, and ``directory`` comes first on the import path.  With
    ``isolate``, modules of the same names that were imported before are out of sight, and no bytecode of the directory is read.
    All of it is put back afterwards.
    """
    path, arguments = list(sys.path), list(sys.argv)
    finder = _DirectoryFinder(directory) if directory is not None and isolate else None
    hidden = _hide_modules(directory) if directory is not None and isolate else {}
    try:
        if directory is not None:
            sys.path.insert(0, str(directory))
        if finder is not None:
            sys.meta_path.insert(0, finder)
        if argv:
            sys.argv[:] = [argv]
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:], sys.argv[:] = path, arguments
        if finder is not None:
            sys.meta_path.remove(finder)
        _unhide_modules(hidden)


def _hide_modules(directory: Path) -> dict[str, ModuleType]:
    if directory.name in _INSTALLED:
        return {}
    tops = {name.partition(".")[0] for name in list(sys.modules)} - _NEVER_HIDDEN
    provided = {top for top in tops if _provides(directory, top)}
    names = [name for name in list(sys.modules) if name.partition(".")[0] in provided]
    return {name: sys.modules.pop(name) for name in names}


def _provides(directory: Path, top: str) -> bool:
    if (directory / f"{top}.py").is_file() or (directory / top / "__init__.py").is_file():
        return True
    module = sys.modules.get(top)
    is_namespace = getattr(module, "__file__", None) is None and hasattr(module, "__path__")
    return is_namespace and (directory / top).is_dir()


def _unhide_modules(hidden: dict[str, ModuleType]) -> None:
    tops = {name.partition(".")[0] for name in hidden}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
    sys.modules.update(hidden)


def describe_failure(error: BaseException, where: str, directory: Path | None) -> tuple[str, str]:
    """One line and a hint for an exception that the model's source raised.

    Args:
        error: what was raised.
        where: what was running, for instance ``"model.py"`` or ``"build_model() of model.py"``.
        directory: the source's directory; the deepest frame inside it is named.
    """
    if isinstance(error, SyntaxError):
        file = Path(error.filename).name if error.filename else where
        return (
            f"{file}{'' if error.lineno is None else f':{error.lineno}'}: syntax error: {one_line(error.msg)}",
            "correct the line, or use the Python that the file is for",
        )
    place = _deepest_frame(error, directory)
    if isinstance(error, SystemExit):
        return f"{where} called sys.exit(){place}", 'put what a script does under if __name__ == "__main__":'
    message = f"{where} failed: {type(error).__name__}: {one_line(error)}{place}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return message, "name it as a module instead: package.module:name"
    if isinstance(error, ModuleNotFoundError):
        return message, f"install what provides {error.name!r}, or run where it can be imported"
    if isinstance(error, FileNotFoundError):
        return message, "the source reads a file that is not there; only Python files are copied with a converted model"
    return message, "the error is the source's own: importing it in Python shows the whole traceback"


def _deepest_frame(error: BaseException, directory: Path | None) -> str:
    if directory is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_below(f.filename, str(directory))]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).relative_to(directory).as_posix()}:{frames[-1].lineno})"
