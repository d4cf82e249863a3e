"""How functions become kernels: compiled for declared signatures when they are first needed, and kept on disk.

A kernel costs a tenth of a second to a few seconds to compile, once on a machine, and a millisecond to load after that.
Importing one compiles nothing: what a query does not use is never waited for.

Machine code is kept where Numba keeps it: below `NUMBA_CACHE_DIR`, else in `__pycache__` beside the module, else, if
this user cannot write there, in the user's own cache. Code that an installation has compiled is used by all users.
"""

# mypy: disable-error-code="misc,no-untyped-call,untyped-decorator"

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

from numba import config, njit
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.typeinfer import register_dispatcher

_OPTIONS = {"nopython": True, "nogil": True}

KERNELS: list[Kernel] = []
"""Every kernel that has been imported."""


_NumbaPlaces: Any = FunctionCache._impl_class
_InTree: Any = next(one for one in _NumbaPlaces._locator_classes if one.__name__.lstrip("_") == "InTreeCacheLocator")
"""Numba's locator of `__pycache__`: its name has an underscore in some versions."""


class _InstalledFolder(_InTree):
    """`__pycache__` beside the module, also where this user cannot write: Numba passes over it then."""

    def ensure_cache_path(self) -> None:
        """Accept any folder: it is only read."""


class _InstalledPlace(_NumbaPlaces):
    """Where an installation keeps machine code."""

    _locator_classes: ClassVar = [_InstalledFolder]


class _InstalledCache(FunctionCache):
    """The machine code that an installation has compiled."""

    _impl_class = _InstalledPlace


class Kernel(CPUDispatcher):
    """A function that is compiled for its declared signatures when it is first called, by Python or by another kernel.

    The GIL is released while it runs. Processes that need the same kernel at once compile it once.
    """

    _cache: Any

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:  # as Numba rebuilds it
        super().__init__(py_func, locals or {}, targetoptions or _OPTIONS)
        self.declared: tuple[Any, ...] = ()
        with suppress(RuntimeError):  # there is nowhere to keep it: no folder of this user's can be written to
            self.enable_caching()

    @property
    def ready(self) -> bool:
        """Whether all that is declared is compiled in this process."""
        return not self._can_compile

    @property
    def folder(self) -> Path | None:
        """The folder that keeps the machine code; None if this user can write none."""
        return Path(self._cache.cache_path) if self._cache.cache_path else None

    @property
    def kept(self) -> bool:
        """Whether the machine code of all that is declared is on disk."""
        return self._holds(self._cache) or self._installed() is not None

    def _holds(self, cache: Any) -> bool:
        if cache.cache_path is None:
            return False
        known, codegen = cache._cache_file._load_index(), self.targetctx.codegen()
        return all(cache._index_key(one, codegen) in known for one in self.declared)

    def _installed(self) -> Any:
        """The installation's cache, if it holds all that is declared and the user has named no other folder."""
        if config.CACHE_DIR:
            return None
        with suppress(RuntimeError, OSError):  # there is no source file, or this user cannot read there
            cache = _InstalledCache(self.py_func)
            if cache.cache_path != self._cache.cache_path and self._holds(cache):
                return cache
        return None

    def prepare(self, *, alone: bool = True) -> None:
        """Load or compile what is declared, unless that was done.

        Args:
            alone: whether to hold off others that need the kernel, who would wait for a process of low priority.
        """
        if self.ready:
            return
        with global_compiler_lock, self._alone() if alone else nullcontext(), register_dispatcher(self):
            if self.ready:
                return  # another thread was faster
            if not self._holds(self._cache):
                self._cache = self._installed() or self._cache
            for signature in self.declared:
                self.compile(signature)
            self.disable_compile()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold off other processes that need this kernel: they find it on disk then."""
        if self.folder is None or self.kept:
            yield
            return
        lock = open_lock(Path(f"{self._cache._cache_file._index_path}.lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def __call__(self, *args: Any) -> Any:
        """Run it: compiled first, for Numba would look up what to run, and compile, while another thread does."""
        if self.declared and not self.ready:
            self.prepare()
        return super().__call__(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """For Numba, when another kernel that calls this one is compiled."""
        if self.declared:
            self.prepare()
        return super().get_call_template(args, kws)


def kernel(*signatures: Any) -> Callable[[Any], Any]:
    """Make a function a kernel with these signatures (Numba's types or text).

    Without any it is for other kernels, and compiled for what they call it with.
    """

    def declare(function: Any) -> Kernel:
        made = Kernel(function)
        made.declared = signatures
        if signatures:
            KERNELS.append(made)
        return made

    return declare


def helper(function: Any) -> Any:
    """Compile a function of numbers and addresses to be built into the kernels that call it."""
    return njit(forceinline=True, nogil=True, no_cpython_wrapper=True)(function)


def inlined(function: Any) -> Any:
    """Have a function's lines stand in the kernels that call it: for functions of arrays.

    Numba counts the references that a `helper` takes to them, which costs a nanosecond a call.
    """
    return njit(inline="always")(function)


def open_lock(file: Path) -> int:
    """Open a file to be locked, which another user may have made: who may write to the folder may lock."""
    return os.open(file, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o644)


def missing(kernels: Iterable[Kernel] = KERNELS) -> list[Kernel]:
    """The kernels that are not on disk, though they could be kept there."""
    return [one for one in kernels if one.folder is not None and not one.kept]
