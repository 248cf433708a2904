"""Import a package from its sources alone: bytecode that lies beside them is neither read nor written.

Digests cover sources. Python would run a planted or stale .pyc in their place without a word.
"""

import importlib.machinery
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType


@contextmanager
def source_only(package: str) -> Generator[None]:
    """Inside, `package` is imported from source; its submodules are so also afterwards."""
    _finder.add(package)
    prefix, dont_write = sys.pycache_prefix, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory() as empty:
        sys.pycache_prefix, sys.dont_write_bytecode = empty, True
        try:
            yield
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = prefix, dont_write


class _SourceOnlyLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _SourceOnlyFinder(MetaPathFinder):
    """Keeps bytecode out of a package's submodules, also those imported long after the package itself."""

    def __init__(self) -> None:
        self._packages: set[str] = set()

    def add(self, package: str) -> None:
        self._packages.add(package)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, dot, _ = fullname.partition(".")
        if not dot or package not in self._packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _SourceOnlyLoader(spec.loader.name, spec.loader.path)
        return spec


_finder = _SourceOnlyFinder()
