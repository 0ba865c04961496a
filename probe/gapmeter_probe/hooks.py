"""Wraps an engine's functions by name, now or as soon as their module is imported, and says which it could not find.

A hook never raises into the engine: a failure inside it is recorded once, with the stages that it leaves unmeasured.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import multiprocessing.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gapmeter_probe import calls
from gapmeter_probe.calls import Stamps, now
from gapmeter_probe.digests import known
from gapmeter_probe.writer import RecordWriter, open_probe

logger = logging.getLogger("vllm.gapmeter_probe")  # vLLM shows what is logged beneath its own name
__all__ = ["Hook", "Probe", "Stamps", "install", "now"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Hook:
    """Where to hook in, and what cannot be measured without.

    ``targets`` are ``module:Class.attribute`` or ``module:attribute``; ``every`` wraps each of them (those that are
    missing matter only if all are), else the first that exists.
    """

    targets: tuple[str, ...]
    stages: tuple[str, ...]
    wrap: Wrap
    every: bool = False


class Probe:
    """What one role of a process records. Subclasses give ``role`` and ``make_hooks``; the file opens on first use."""

    role = ""

    def __init__(self) -> None:
        self.writer: RecordWriter | None = None
        self._problems: list[dict[str, Any]] = []
        self._failed: set[str] = set()
        self._hooks: list[Hook] = []
        self.wrapped: set[tuple[Hook, str]] = set()  # a hook, and the target that it has wrapped
        # What is wrapped, and of whose code it has not been said yet whether it is known.
        self.read: list[tuple[Hook, str, Callable[..., Any]]] = []

    def hooks(self) -> list[Hook]:
        """Made once: a hook is known by its identity, since several may wrap one target."""
        if not self._hooks:  # no functools.cached_property: it makes every attribute of the probe slower to read
            self._hooks = self.make_hooks()
        return self._hooks

    def make_hooks(self) -> list[Hook]:
        raise NotImplementedError

    def open(self, describe: Mapping[str, object]) -> None:
        """Open this role's file, once, and put into it what was found missing up to now."""
        if self.writer is not None:
            return
        try:
            self.writer = open_probe(self.role, describe)
        except OSError as error:
            logger.warning("gapmeter: nothing of this process is recorded: %s", error)
        if self.writer is not None:  # a child of multiprocessing leaves without running atexit's functions
            multiprocessing.util.Finalize(None, self.writer.close, exitpriority=0)
        self.review()
        for problem in self._problems:
            self._report(problem)

    def review(self, imported: str = "") -> None:
        """Note hooks none of whose targets exists or may still come; ``imported`` has just run to its end.

        Of the others: whether their code is that of a version on which the probe was tested.
        """
        if self.writer is None:
            return
        code = [(target, known(target, function), hook.stages) for hook, target, function in self.read]
        self.read.clear()
        if told := [each for each in code if each[1] is not None]:
            changed = [{"hook": target, "stages": list(stages)} for target, same, stages in told if not same]
            self.writer.json(
                {"type": "code", "known": [target for target, same, _ in told if same], "changed": changed}
            )
        for hook in self.hooks():
            if any((hook, target) in self.wrapped or _pending(target, imported) for target in hook.targets):
                continue
            name = hook.targets[0]
            if hook.stages and name not in self._failed:
                self._failed.add(name)
                self._report({"type": "missing", "hook": name, "stages": list(hook.stages)})

    def close(self, *_: Any) -> None:
        """Mark the file complete: an engine may kill its children soon after it has asked them to stop."""
        if self.writer is not None:
            self.writer.close()

    def failed(self, hook: str, stages: Sequence[str], error: BaseException) -> None:
        """Note that our own code failed in a hook; only the first time."""
        if hook not in self._failed:
            self._failed.add(hook)
            reason = f"{type(error).__name__}: {error}"
            self._report({"type": "missing", "hook": hook, "stages": list(stages), "error": reason})

    def _report(self, problem: dict[str, Any]) -> None:
        if self.writer is None:
            self._problems.append(problem)
            return
        self.writer.json(problem)
        stages = ", ".join(problem["stages"]) or "nothing"
        logger.warning("gapmeter: %s %s; unmeasured: %s", problem["hook"], problem.get("error", "is not there"), stages)

    def after(
        self, targets: str | tuple[str, ...], stages: Sequence[str], handle: Callable[..., None], *, every: bool = False
    ) -> Hook:
        """``handle(start_ns, end_ns, result, args)`` once the call has returned (awaited, where it is a coroutine)."""
        return self._hook(targets, stages, lambda call, fail: calls.after(call, handle, fail), every)

    def before(self, targets: str | tuple[str, ...], stages: Sequence[str], handle: Callable[..., object]) -> Hook:
        """``handle(*args)`` before the call is made (before its coroutine is, where it makes one)."""
        return self._hook(targets, stages, lambda call, fail: calls.before(call, handle, fail))

    def around(
        self, targets: str | tuple[str, ...], stages: Sequence[str], begin: Callable[..., Callable[[], None] | None],
        *, every: bool = False,
    ) -> Hook:  # fmt: skip
        """``begin(*args)`` before the call; what it returns is called after it, also when the call raised."""
        return self._hook(targets, stages, lambda call, fail: calls.around(call, begin, fail), every)

    def note(
        self, targets: str | tuple[str, ...], stages: Sequence[str], stamps: Stamps, first: int, *, argument: int = -1,
        every: bool = False,
    ) -> Hook:  # fmt: skip
        """No code of ours: when the latest call began and ended is left in ``stamps``; see ``calls.note``."""
        return self._hook(targets, stages, lambda call, _: calls.note(call, stamps, first, argument), every)

    def arrival(
        self, targets: str | tuple[str, ...], stages: Sequence[str], code: int, stamps: Stamps, at: int,
        attribute: str | None = None, *, every: bool = False,
    ) -> Hook:  # fmt: skip
        """A span of a call, or of the future that it gives; see ``calls.arrival``."""
        return self._hook(
            targets, stages, lambda call, fail: calls.arrival(call, self, fail, code, stamps, at, attribute), every
        )

    def _hook(
        self, targets: str | tuple[str, ...], stages: Sequence[str], wrap: Callable[..., Any], every: bool = False
    ) -> Hook:
        """``wrap`` is given the function, and what to call with an error of our own."""
        names = (targets,) if isinstance(targets, str) else targets
        fail = functools.partial(self.failed, names[0], stages)
        return Hook(names, tuple(stages), lambda call: wrap(call, fail), every)


def install(probes: Sequence[Probe]) -> None:
    """Wrap every hook's targets in modules that are there, and watch for the others."""
    if any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    watch = _Watch(probes)
    for probe in probes:
        for hook in probe.hooks():
            for target in hook.targets:
                watch.add(target.partition(":")[0], functools.partial(_apply, probe, hook, target))
    for name in list(watch.waiting):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            watch.run(module)
    sys.meta_path.insert(0, watch)


def _apply(probe: Probe, hook: Hook, target: str, module: ModuleType) -> None:
    """Wrap one target if it is there; the earlier targets of a hook win over the later ones."""
    if not hook.every and any((hook, other) in probe.wrapped for other in hook.targets):
        return
    owner: Any = module
    *path, attribute = target.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, "__dict__", {}).get(attribute)  # an engine's module may put anything there
    function = original.__func__ if isinstance(original, staticmethod) else original
    if not callable(function):
        return
    try:
        wrapped = hook.wrap(function)
        setattr(owner, attribute, wrapped if function is original else staticmethod(wrapped))
    except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine, whose import this is
        probe.failed(hook.targets[0], hook.stages, error)
        return
    probe.wrapped.add((hook, target))
    probe.read.append((hook, target, function))


def _pending(target: str, imported: str) -> bool:
    """Whether the target's module exists but has not run to its end yet."""
    name = target.partition(":")[0]
    if name == imported:
        return False
    if name in sys.modules:
        return bool(getattr(sys.modules[name].__spec__, "_initializing", False))
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - it imports the packages around it, which may raise anything
        return False


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets the real finders find, and runs our work once a module's own code has run."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = probes
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def add(self, name: str, work: Callable[[ModuleType], None]) -> None:
        self.waiting.setdefault(name, []).append(work)

    def run(self, module: ModuleType) -> None:
        for work in self.waiting.pop(module.__name__, ()):
            work(module)
        for probe in self._probes:
            probe.review(module.__name__)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """The module's own loader, and our work after it."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # whoever looks at the module finds it as without us
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watch.run(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
