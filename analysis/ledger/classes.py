"""The activities that own time: ``CLASSES``, in the order in which overlapping ones own it.

Scheduler states come first (they hold only before the first scheduling and while preempted); then own forward, own
input preparation and sampling, another's step, code inside a process, the calls that enclose it, executor messages, the
engine loop's own time, and last the stretches between two causally adjacent stamps of different processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.stages import UNEXPLAINED


@dataclass(frozen=True, slots=True)
class Class:
    """A priority class: the stage that its time belongs to.

    ``transit``: between two stamps with nothing stamped between. ``enclosing``: within a stamped call, where no stamp
    says what it did. ``thread``: whose thread had to run (a kind of CoreUse). ``busy``: whose time it is when that one,
    which should take a message or go on with this, was at work at another.
    """

    name: str
    stage: str
    transit: bool = False
    enclosing: bool = False
    thread: str = ""
    busy: str = ""


CLASSES: tuple[Class, ...] = (
    Class("queue", "queue"),
    Class("preempted", "preempted"),
    Class("engine_wait", "engine_wait", thread="engine"),
    Class("prefill", "prefill", thread="forward"),
    Class("decode", "decode", thread="forward"),
    Class("untimed", UNEXPLAINED),
    Class("input_prep", "input_prep", thread="worker"),
    Class("sampling", "sampling", thread="worker"),
    Class("launch_gap", "launch_gap", thread="worker"),
    Class("other_step", "other_step", thread="forward"),
    Class("template", "template", thread="pool"),
    Class("tokenize", "tokenize", thread="pool"),
    Class("template_inline", "template", thread="loop"),
    Class("tokenize_inline", "tokenize", thread="loop"),
    Class("template_wait", "template", transit=True, thread="pool woken", busy="template"),
    Class("tokenize_wait", "tokenize", transit=True, thread="pool woken", busy="tokenize"),
    Class("template_back", "template", transit=True, thread="loop woken", busy="accept_wait"),
    Class("tokenize_back", "tokenize", transit=True, thread="loop woken", busy="accept_wait"),
    Class("detokenize", "detokenize", thread="loop"),
    Class("engine_code", "scheduling", thread="engine"),
    Class("handoff", "handoff", thread="loop"),
    Class("handoff_receive", "handoff", thread="receiver"),
    Class("output_put", "output", thread="engine"),
    Class("output_send", "output", thread="sender"),
    Class("output_receive", "output", thread="loop"),
    Class("ingress_inline", "ingress", thread="loop"),
    Class("ingress_part", "ingress", thread="loop turn", busy="accept_wait"),
    Class("ingress", "ingress", enclosing=True, thread="loop turn", busy="accept_wait"),
    Class("egress", "egress", thread="loop"),
    Class("egress_turn", "egress", enclosing=True, thread="loop turn", busy="accept_wait"),
    Class("connect", "connect"),
    Class("generator_lag", "generator_lag"),
    Class("read_late", "generator_lag"),
    Class("retry", "retry"),
    Class("worker", "scheduling", enclosing=True, thread="worker"),
    Class("executor_call", "scheduling", enclosing=True, thread="engine"),
    Class("executor", "scheduling", transit=True, thread="executor"),
    Class("loop", "scheduling", enclosing=True, thread="engine"),
    Class("handoff_transit", "handoff", transit=True, thread="engine woken"),
    Class("output_ready", "output", transit=True, thread="engine woken"),
    Class("output_transit", "output", transit=True, thread="loop woken", busy="output"),
    Class("network", "network_in", transit=True),
    Class("network_in", "network_in", transit=True, thread="loop woken", busy="accept_wait"),
    Class("network_out", "network_out", transit=True),
)
CLASS = {c.name: number for number, c in enumerate(CLASSES)}
DEVICE_CLASSES = frozenset({"prefill", "decode", "other_step"})
FORWARD_CLASSES = np.array([CLASS["prefill"], CLASS["decode"]])
HOST_CLASSES = np.array([CLASS[n] for n in ("engine_code", "input_prep", "sampling", "output_put", "output_send")])
