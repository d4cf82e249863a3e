"""What cannot be awaited in a processor: all but state."""

from __future__ import annotations

from typing import Any

from millpond.errors import UsageError

NO_LOOP = "no running event loop"
"""What asyncio says where it is used without one."""

_NEXT = ("ag_await", "cr_await", "gi_yieldfrom")
_FRAMES = ("ag_frame", "cr_frame", "gi_frame")


def refusal(given: Any, key: Any, record: Any) -> UsageError:
    """The error about something else than state that is awaited.

    Args:
        given: what it gave to whoever drives the coroutine.
        key: that the processor is called for. record: what the user's function has given, which is suspended now.
    """
    return _refusal(_name(given, record), key)


def without_loop(error: RuntimeError, key: Any) -> UsageError:
    """The error about what asyncio cannot do without its loop, from asyncio's error."""
    name, at = "what asyncio's event loop runs", error.__traceback__
    while at is not None:
        module = str(at.tb_frame.f_globals.get("__name__"))
        if module.startswith("asyncio."):
            name = f"{module}.{at.tb_frame.f_code.co_qualname}"
            break
        at = at.tb_next
    return _refusal(name, key)


def _refusal(name: str, key: Any) -> UsageError:
    return UsageError(
        f"The processor awaits {name} for key {key!r}, but nothing except state can be awaited.",
        action="Await what state variables and the handle return, or millpond.gather of it; call other things without "
        "await (they block the task), or move them before or behind the processor.",
    )


def _name(given: Any, record: Any) -> str:
    """The name of what is awaited: of the outermost thing that is not the processor's own, else of the innermost."""
    own, kind = _module(record), type(given)
    name = foreign = f"{kind.__module__.removeprefix('_')}.{kind.__qualname__}"
    while (record := _following(record)) is not None:
        module = _module(record)
        if module is None:  # written in C
            return foreign
        name = record.__qualname__ if module == own else f"{module}.{record.__qualname__}"
        if module != own:
            break
    return name


def _following(record: Any) -> Any:
    """What a coroutine or generator awaits."""
    return next((found for name in _NEXT if (found := getattr(record, name, None)) is not None), None)


def _module(record: Any) -> Any:
    frame = next((found for name in _FRAMES if (found := getattr(record, name, None)) is not None), None)
    return None if frame is None else frame.f_globals.get("__name__")
