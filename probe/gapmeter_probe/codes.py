"""Span codes as plain numbers: to look up and pack a member of an enumeration costs several times as much."""

from __future__ import annotations

from gapmeter_probe.records import Span

INGRESS = int(Span.INGRESS)
TEMPLATE = int(Span.TEMPLATE)
TOKENIZE = int(Span.TOKENIZE)
HANDOFF = int(Span.HANDOFF)
OUTPUT_RECEIVE = int(Span.OUTPUT_RECEIVE)
DETOKENIZE = int(Span.DETOKENIZE)
EGRESS = int(Span.EGRESS)
HTTP = int(Span.HTTP)
APPLICATION = int(Span.APPLICATION)
REQUEST = int(Span.REQUEST)
CORE_RECEIVE = int(Span.CORE_RECEIVE)
CORE_ADD = int(Span.CORE_ADD)
PREEMPT = int(Span.PREEMPT)
LOOP = int(Span.LOOP)
SCHEDULE = int(Span.SCHEDULE)
EXECUTE = int(Span.EXECUTE)
SAMPLE_CALL = int(Span.SAMPLE_CALL)
UPDATE = int(Span.UPDATE)
OUTPUT_PUT = int(Span.OUTPUT_PUT)
OUTPUT_SEND = int(Span.OUTPUT_SEND)
WORKER = int(Span.WORKER)
INPUT_PREP = int(Span.INPUT_PREP)
FORWARD = int(Span.FORWARD)
SAMPLING = int(Span.SAMPLING)
HOST_LAUNCH = int(Span.HOST_LAUNCH)
KERNELS = int(Span.KERNELS)
