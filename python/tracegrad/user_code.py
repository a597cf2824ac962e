"""A user's `file.py` as a module: what `file.py:NAME` names is found in it, on a command line and in Python.

Here is `module_of`. Who calls it says what NAME may be.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tracegrad.plain_files import refuse_special

_modules: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
_folders: set[Path] = set()


def module_of(path: str | Path) -> ModuleType:
    """Run a file as Python runs a script, and return it as a module.

    - A file is run once; after it was changed it is run again. Several names of it are of one module.
    - Files next to it can be imported by it. Two folders may have files of one name.
    - Its name is that of the file, so that its classes can be pickled; a name that another module has gets a number.

    Raises:
        OSError: if there is no such file.
        Exception: what running it raises.
    """
    path = Path(path).resolve()
    refuse_special(path)
    status = path.stat()
    stamp = status.st_mtime_ns, status.st_size
    if path in _modules and _modules[path][0] == stamp:
        return _modules[path][1]
    known = sys.modules.get(path.stem)
    if known is not None and path not in _modules and _file(known) == path:
        return known  # the script that runs, or what it has imported
    name = _modules[path][1].__name__ if path in _modules else _free(path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    _first_on_the_path(path.parent)
    importlib.invalidate_caches()
    before, module = sys.modules.get(name), importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    _modules[path] = stamp, module
    return module


def _free(stem: str) -> str:
    """A name that no module has."""
    if stem not in sys.modules:
        return stem
    return next(name for number in range(len(sys.modules) + 1) if (name := f"{stem}-{number}") not in sys.modules)


def _file(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or "").resolve()


def _first_on_the_path(folder: Path) -> None:
    """Let imports find the files of a folder before those of another user's folder that have the same names."""
    for name, module in list(sys.modules.items()):
        home = _file(module).parent if isinstance(module, ModuleType) else folder
        beside = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if beside and home != folder and (home in _folders or home.parent in _folders):
            del sys.modules[name]
    _folders.add(folder)
    if sys.path[:1] != [str(folder)]:
        sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
