"""What stands around a wrapped function: the clock, and our own code, none of whose failures reaches the engine.

In C where that was built (``_native.c``), in Python else; each of them does the same.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gapmeter_probe.writer import RecordWriter

if TYPE_CHECKING:
    from gapmeter_probe.appender import Stamps

    native: Any = None
else:
    try:
        from gapmeter_probe import _native as native
        from gapmeter_probe._native import Stamps
    except ImportError:  # there was no compiler where it was installed
        from gapmeter_probe.appender import Stamps

        native = None

__all__ = ["Fail", "Sent", "Stamps", "after", "around", "arrival", "before", "mark", "note", "now", "sent", "taken"]

now = time.monotonic_ns
Function = Callable[..., Any]
Fail = Callable[[BaseException], None]
Sent = tuple[RecordWriter, tuple[tuple[int, int, int, int], ...]]  # code, ref, n, queued ns (0: at the call) of each
_MOST = 0xFFFFFFFF


def either(kind: str, original: Function, worker: Any, fail: Fail, python: Function) -> Function:
    """A call of vLLM's worker: in C while ``worker`` (a native Worker) has a writer, else as ``python`` does."""
    return _native(getattr(native, kind), original, worker, fail, python)


def _native(kind: int, original: Function, handle: object, fail: Fail | None, *more: object) -> Function:
    wrapped: Function = functools.update_wrapper(native.wrap(kind, original, handle, fail, *more), original)
    return wrapped


def after(original: Function, handle: Callable[..., None], fail: Fail) -> Function:
    """``handle(start_ns, end_ns, result, args)`` once the call has returned (awaited, where it is a coroutine)."""

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = await original(*args, **kwargs)
        try:
            handle(start, now(), result, args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        return result

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = original(*args, **kwargs)
        try:
            handle(start, now(), result, args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        return result

    if asyncio.iscoroutinefunction(original):
        return awaited
    return _native(native.AFTER, original, handle, fail) if native else called


def before(original: Function, handle: Callable[..., object], fail: Fail) -> Function:
    """``handle(*args)`` before the call is made (before its coroutine is, where it makes one)."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            handle(*args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        return original(*args, **kwargs)

    return _native(native.BEFORE, original, handle, fail) if native else called


def around(original: Function, begin: Callable[..., Callable[[], None] | None], fail: Fail) -> Function:
    """``begin(*args)`` before the call; what it returns is called after it, also when the call raised."""

    def started(args: tuple[Any, ...]) -> Callable[[], None] | None:
        try:
            return begin(*args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
            return None

    def over(end: Callable[[], None] | None) -> None:
        try:
            if end is not None:
                end()
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        end = started(args)
        try:
            return await original(*args, **kwargs)
        finally:
            over(end)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        end = started(args)
        try:
            return original(*args, **kwargs)
        finally:
            over(end)

    if asyncio.iscoroutinefunction(original):
        return awaited
    return _native(native.AROUND, original, begin, fail) if native else called


def note(original: Function, stamps: Stamps, first: int, argument: int = -1) -> Function:
    """Leave in ``stamps[first]`` and the one behind it when the latest call that returned began and ended.

    Behind these the identity of its argument of that number, unless that is below 0. No code of ours runs.
    """

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = original(*args, **kwargs)
        stamps[first], stamps[first + 1] = start, now()
        if argument >= 0:
            stamps[first + 2] = id(args[argument]) if argument < len(args) else 0
        return result

    return _native(native.NOTE, original, None, None, None, 0, stamps, first, argument) if native else called


def arrival(
    original: Function, probe: Any, fail: Fail, code: int, stamps: Stamps, at: int, attribute: str | None
) -> Function:
    """Record a span of the call, to its end or to when the future that it gave has its result (n: ns of the call).

    The step is that of the call's second argument, whose ``attribute`` has it, and is left in ``stamps[at]``; without
    an attribute it is the one that lies there. 0 is no step, and records nothing.
    """

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = original(*args, **kwargs)
        end = now()
        try:
            writer = probe.writer
            if writer:
                if attribute:
                    stamps[at] = getattr(args[1], attribute, 0) if len(args) > 1 else 0
                record(writer, stamps[at], start, end, result)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        return result

    def record(writer: RecordWriter, seq: int, start: int, end: int, result: Any) -> None:
        if not seq:
            return
        if hasattr(result, "add_done_callback"):
            result.add_done_callback(lambda _: writer.span(code, seq, start, now(), min(end - start, _MOST)))
        else:
            writer.span(code, seq, start, end)

    return _native(native.ARRIVAL, original, probe, fail, attribute, code, stamps, at) if native else called


def mark(original: Function, marks: dict[Any, int], fail: Fail, attribute: str) -> Function:
    """Keep in ``marks``, under the first argument's ``attribute``, when the latest call for it ended."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            marks[getattr(args[0], attribute)] = now()
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        return result

    return _native(native.MARK, original, marks, fail, attribute) if native else called


def taken(original: Function, attribute: str, fail: Fail) -> Function:
    """Leave on the first argument, as ``attribute``, when the latest call gave (or was awaited for) something."""

    def tell(args: tuple[Any, ...]) -> None:
        try:
            setattr(args[0], attribute, now())
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        tell(args)
        return result

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result is not None:
            tell(args)
        return result

    coroutine = asyncio.iscoroutinefunction(original)
    if native:
        return _native(native.TAKEN, original, None, fail, attribute, 0, None, 0, -1, coroutine)
    return awaited if coroutine else called


def sent(original: Function, about: Callable[..., Sent | None], fail: Fail) -> Function:
    """Record spans of an awaited call: ``about(*args)`` says beforehand of what, or None for nothing."""

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        told = None
        try:
            told = about(*args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            fail(error)
        start = now()
        result = await original(*args, **kwargs)
        end = now()
        if told is not None:
            try:
                for code, ref, n, queued in told[1]:
                    told[0].span(code, ref, start, end, n, queued)
            except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
                fail(error)
        return result

    return _native(native.SENT, original, about, fail, None, 0, None, 0, -1, True) if native else awaited
