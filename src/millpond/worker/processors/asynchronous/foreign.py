"""Errors of processors that await something other than state."""

from __future__ import annotations

from typing import Any

from millpond.errors import UsageError

NO_LOOP = "no running event loop"
"""Message of asyncio's error where there is no event loop."""

_NEXT = ("ag_await", "cr_await", "gi_yieldfrom")
_FRAMES = ("ag_frame", "cr_frame", "gi_frame")


def refusal(given: Any, key: Any, record: Any) -> UsageError:
    """Create the error for an awaited object that is not state.

    Args:
        given: the object that it yielded to the driver of the coroutine.
        key: the key that the processor is called for.
        record: the suspended result of the user's function.
    """
    return _refusal(_name(given, record), key)


def without_loop(error: RuntimeError, key: Any) -> UsageError:
    """Create the error for a function of asyncio that needs an event loop, from asyncio's error."""
    name, trace = "what asyncio's event loop runs", error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.startswith("asyncio."):
            name = f"{module}.{trace.tb_frame.f_code.co_qualname}"
            break
        trace = trace.tb_next
    return _refusal(name, key)


def _refusal(name: str, key: Any) -> UsageError:
    return UsageError(
        f"The processor awaits {name} for key {key!r}, but nothing except state can be awaited.",
        action="Await what state variables and the handle return, or millpond.gather of it; call other things without "
        "await (they block the task), or move them before or behind the processor.",
    )


def _name(given: Any, record: Any) -> str:
    """Return the name of the awaited object: the outermost one outside the processor's module, else the innermost."""
    own, kind = _module(record), type(given)
    name = foreign = f"{kind.__module__.removeprefix('_')}.{kind.__qualname__}"
    while (record := _awaited_by(record)) is not None:
        module = _module(record)
        if module is None:  # written in C
            return foreign
        name = record.__qualname__ if module == own else f"{module}.{record.__qualname__}"
        if module != own:
            break
    return name


def _awaited_by(record: Any) -> Any:
    """Return the object that a coroutine or generator awaits."""
    return next((awaited for name in _NEXT if (awaited := getattr(record, name, None)) is not None), None)


def _module(record: Any) -> Any:
    frame = next((frame_ for name in _FRAMES if (frame_ := getattr(record, name, None)) is not None), None)
    return None if frame is None else frame.f_globals.get("__name__")
