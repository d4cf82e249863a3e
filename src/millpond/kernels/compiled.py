"""Kernel decorators: functions are compiled for declared signatures on first use, and cached on disk.

A kernel takes from a tenth of a second to a few seconds to compile, once per machine, and a millisecond to load
afterwards. Importing a kernel compiles nothing, so a query never waits for kernels that it does not use.

Machine code is stored in Numba's locations: below `NUMBA_CACHE_DIR`, else in `__pycache__` beside the module, else,
if this user cannot write there, in the user's own cache. Code that an installation has compiled is shared by all
users.
"""

# mypy: disable-error-code="misc,no-untyped-call,untyped-decorator"

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from numba import config, njit
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.typeinfer import register_dispatcher

_OPTIONS = {"nopython": True, "nogil": True}

KERNELS: list[Kernel] = []
"""All kernels that have been imported."""


_NumbaPlaces: Any = FunctionCache._impl_class
_InTree: Any = next(cls for cls in _NumbaPlaces._locator_classes if cls.__name__.lstrip("_") == "InTreeCacheLocator")
"""Numba's locator of `__pycache__`; its name has a leading underscore in some versions."""


class _InstalledFolder(_InTree):
    """Locator of `__pycache__` beside the module, even if this user cannot write there (Numba would skip it)."""

    def ensure_cache_path(self) -> None:
        """Accept any folder: it is only read."""


class _InstalledPlace(_NumbaPlaces):
    """Cache location of an installation's machine code."""

    _locator_classes: ClassVar = [_InstalledFolder]


def _millpond_version() -> str:
    try:
        return version("millpond")
    except PackageNotFoundError:  # a source tree that is not installed
        return ""


_VERSION = _millpond_version()
_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^from millpond\.([\w.]+) import", re.MULTILINE)


@cache
def _stamps(file: Path) -> frozenset[tuple[str, int, int]]:
    """Time and size of a file of the package and of the files whose code or constants its kernels may contain."""
    if not file.exists():  # a package
        file = file.with_suffix("") / "__init__.py"
    found = file.stat()
    stamp = frozenset({(str(file.relative_to(_PACKAGE)), found.st_mtime_ns, found.st_size)})
    if file.is_relative_to(_PACKAGE / "kernels"):  # of the rooms above, kernels contain constants only
        names = _IMPORT.findall(file.read_text())
        stamp = stamp.union(*(_stamps(_PACKAGE / f"{name.replace('.', '/')}.py") for name in names))
    return stamp


class _KernelCache(FunctionCache):
    """Cache of machine code that is loaded only if it was compiled from this version of all files that it came from.

    Numba compares a kernel's own file. Functions of other files are compiled into kernels, and a change may touch
    them alone. Installers leave the machine code of the version before in place.
    """

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        file = Path(py_func.__code__.co_filename)
        others = sorted(_stamps(file)) if file.is_relative_to(_PACKAGE) else []
        self._cache_file._source_stamp = self._cache_file._source_stamp, _VERSION, others


class _InstalledCache(_KernelCache):
    """Read-only cache of the machine code that an installation has compiled."""

    _impl_class = _InstalledPlace


class Kernel(CPUDispatcher):
    """A function that is compiled for its declared signatures on first call, by Python or by another kernel.

    It runs without the GIL. If several processes need the same kernel at once, one of them compiles it.
    """

    _cache: Any

    # Numba calls it with these arguments to rebuild a dispatcher
    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(py_func, locals or {}, targetoptions or _OPTIONS)
        self.declared: tuple[Any, ...] = ()
        with suppress(RuntimeError):  # no cache: this user can write to no folder
            self._cache = _KernelCache(py_func)

    @property
    def ready(self) -> bool:
        """Whether all declared signatures are compiled in this process."""
        return not self._can_compile

    @property
    def folder(self) -> Path | None:
        """The folder of the machine code; None if this user can write to no folder."""
        return Path(self._cache.cache_path) if self._cache.cache_path else None

    @property
    def is_cached(self) -> bool:
        """Whether the machine code of all declared signatures is on disk."""
        return self._holds(self._cache) or self._installed() is not None

    def _holds(self, cache: Any) -> bool:
        if cache.cache_path is None:
            return False
        known, codegen = cache._cache_file._load_index(), self.targetctx.codegen()
        return all(cache._index_key(signature, codegen) in known for signature in self.declared)

    def _installed(self) -> Any:
        """Return the installation's cache if it has all declared signatures and the user configured no other folder."""
        if config.CACHE_DIR:
            return None
        with suppress(RuntimeError, OSError):  # no source file, or this user cannot read it
            cache = _InstalledCache(self.py_func)
            if cache.cache_path != self._cache.cache_path and self._holds(cache):
                return cache
        return None

    def prepare(self, *, exclusive: bool = True) -> None:
        """Load or compile the declared signatures, unless that has been done.

        Args:
            exclusive: take the lock that makes other processes wait for the compilation. A process of low priority must
                not take it, since the others would wait for it.
        """
        if self.ready:
            return
        with global_compiler_lock, self._exclusive() if exclusive else nullcontext(), register_dispatcher(self):
            if self.ready:
                return  # another thread has done it
            if not self._holds(self._cache):
                self._cache = self._installed() or self._cache
            for signature in self.declared:
                self.compile(signature)
            self.disable_compile()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock out other processes that need this kernel until it is on disk."""
        if self.folder is None or self.is_cached:
            yield
            return
        lock = lock_file(Path(f"{self._cache._cache_file._index_path}.lock"), wait=True)
        try:
            yield
        finally:
            os.close(lock)

    def __call__(self, *args: Any) -> Any:
        """Compile the kernel if needed, and call it: Numba would compile it again while another thread does."""
        if self.declared and not self.ready:
            self.prepare()
        return super().__call__(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Called by Numba when it compiles another kernel that calls this one."""
        if self.declared:
            self.prepare()
        return super().get_call_template(args, kws)


def kernel(*signatures: Any) -> Callable[[Any], Any]:
    """Make a function a kernel with these signatures (Numba types or strings).

    Without signatures it is only for other kernels, and compiled for the types with which they call it.
    """

    def declare(function: Any) -> Kernel:
        dispatcher = Kernel(function)
        dispatcher.declared = signatures
        if signatures:
            KERNELS.append(dispatcher)
        return dispatcher

    return declare


def helper(function: Any) -> Any:
    """Compile a function of numbers and addresses that is inlined into the kernels that call it."""
    return njit(forceinline=True, nogil=True, no_cpython_wrapper=True)(function)


def inlined(function: Any) -> Any:
    """Inline a function of arrays into the kernels that call it, at the level of Numba's IR.

    In a `helper`, Numba counts references to arrays, which costs a nanosecond per call.
    """
    return njit(inline="always")(function)


def lock_file(file: Path, *, wait: bool) -> int:
    """Lock a file, and return the lock's descriptor; closing it releases the lock.

    Another user may have created the file: every user with write access to the folder may lock it.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    lock = os.open(file, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def missing(kernels: Iterable[Kernel] = KERNELS) -> list[Kernel]:
    """Return the kernels that are not on disk though they could be."""
    return [kernel for kernel in kernels if kernel.folder is not None and not kernel.is_cached]
