"""The classes of activity in the order in which overlapping ones own time, and the stage that each belongs to.

Scheduler states come first (they hold only before the first scheduling and while preempted); then own forward, own
input preparation and sampling, another's step, code inside a process, executor messages, the engine loop's own time,
and last the stretches between two causally adjacent stamps of different processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapmeter.records import CoreThread


@dataclass(frozen=True, slots=True)
class Class:
    """A priority class: the stage that its time belongs to, and whether it is transit."""

    name: str
    stage: str
    transit: bool = False


_WORK: tuple[Class, ...] = (
    Class("queue", "queue"),
    Class("preempted", "preempted"),
    Class("engine_wait", "engine_wait"),
    Class("prefill", "prefill"),
    Class("decode", "decode"),
    Class("input_prep", "input_prep"),
    Class("sampling", "sampling"),
    Class("other_step", "other_step"),
    Class("template", "template"),
    Class("tokenize", "tokenize"),
    Class("pool_core_wait", "core_wait"),
    Class("template_wait", "template", transit=True),
    Class("tokenize_wait", "tokenize", transit=True),
    Class("detokenize", "detokenize"),
    Class("engine_code", "scheduling"),
    Class("handoff", "handoff"),
    Class("output", "output"),
    Class("ingress", "ingress"),
    Class("egress", "egress"),
    Class("connect", "connect"),
    Class("generator_lag", "generator_lag"),
    Class("retry", "retry"),
    Class("worker", "scheduling"),
    Class("executor", "scheduling", transit=True),
    Class("loop", "scheduling"),
    Class("core_wait", "core_wait"),
    Class("accept_wait", "accept_wait"),
    Class("output_loop", "output"),
    Class("handoff_transit", "handoff", transit=True),
    Class("output_transit", "output", transit=True),
    Class("network_in", "network_in", transit=True),
    Class("network_out", "network_out", transit=True),
)
# Whose core a class of activity needs: what it waited for that thread's core, put off it, is no time of its stage.
_BY_THREAD = {
    "engine": "engine_wait prefill decode input_prep sampling other_step engine_code worker executor loop",
    "pool": "template tokenize",
    "loop": "detokenize ingress egress accept_wait output_loop",
}
THREADS: dict[str, str] = {name: thread for thread, names in _BY_THREAD.items() for name in names.split()}
# Which thread should take what lies between two processes' or threads' stamps.
WOKEN: dict[str, str] = {
    "network_in": "loop woken",
    "output_transit": "loop woken",
    "handoff_transit": "engine woken",
}
# Its wait for a core comes directly before each class that has a thread.
CLASSES: tuple[Class, ...] = tuple(
    part
    for work in _WORK
    for part in ((Class(f"{work.name}_core", "core_wait"), work) if work.name in {**THREADS, **WOKEN} else (work,))
)
CLASS = {c.name: number for number, c in enumerate(CLASSES)}
# Stretches between two processes' or threads' stamps, whose core those who receive there may have had to wait for.
CORE_WAITS: dict[str, tuple[str, tuple[CoreThread, ...]]] = {
    "network_in": ("core_wait", (CoreThread.LOOP,)),
    "template_wait": ("pool_core_wait", (CoreThread.POOL, CoreThread.LOOP)),
    "tokenize_wait": ("pool_core_wait", (CoreThread.POOL, CoreThread.LOOP)),
    "handoff_transit": ("core_wait", (CoreThread.INPUT,)),
    "output_transit": ("core_wait", (CoreThread.OUTPUT, CoreThread.LOOP)),
}
# Such stretches that end when the API server's event loop looks, and what it is when the loop worked for others then.
LOOP_WAITS = {"network_in": "accept_wait", "output_transit": "output_loop"}
DEVICE_CLASSES = frozenset({"prefill", "decode", "other_step"})
FORWARD_CLASSES = np.array([CLASS["prefill"], CLASS["decode"]])
HOST_CLASSES = np.array([CLASS["engine_code"], CLASS["input_prep"], CLASS["sampling"], CLASS["output"]])
