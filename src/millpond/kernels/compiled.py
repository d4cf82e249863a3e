"""How functions become kernels: compiled for declared signatures when they are first needed, and kept on disk.

A kernel costs a tenth of a second to a few seconds to compile, once on a machine, and a millisecond to load after that.
Importing one compiles nothing: what a query does not use is never waited for.
"""

# mypy: disable-error-code="misc,no-untyped-call,untyped-decorator"

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from numba import njit
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.typeinfer import register_dispatcher

_OPTIONS = {"nopython": True, "nogil": True}

KERNELS: list[Kernel] = []
"""Every kernel that has been imported."""


class Kernel(CPUDispatcher):
    """A function that is compiled for its declared signatures when it is first called, by Python or by another kernel.

    The GIL is released while it runs. Processes that need the same kernel at once compile it once.
    """

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
    def kept(self) -> bool:
        """Whether the machine code of all that is declared is on disk."""
        cache = getattr(self._cache, "_cache_file", None)
        if cache is None:
            return False
        known, codegen = cache._load_index(), self.targetctx.codegen()
        return all(self._cache._index_key(one, codegen) in known for one in self.declared)

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
            for signature in self.declared:
                self.compile(signature)
            self.disable_compile()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold off other processes that need this kernel: they find it on disk then."""
        cache = getattr(self._cache, "_cache_file", None)
        if cache is None or self.kept:
            yield
            return
        lock = os.open(f"{cache._index_path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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


def missing() -> list[Kernel]:
    """The kernels that are not on disk."""
    return [one for one in KERNELS if not one.kept]
