"""The record types that probes and load generators write. This module is the schema.

A file holds one process's records: a 16-byte file header, then frames. All integers are little-endian; every
stamp is CLOCK_MONOTONIC in nanoseconds. A frame is an 8-byte head (``HEAD``: size in bytes including the head
and a multiple of 8, kind, code) and a payload that its kind fixes. A frame of size 0 means "nothing written
from here on". A frame may be torn only if it is the last one of a process that was killed.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

MAGIC = b"GAPMETER"
SCHEMA_VERSION = 1

FILE_HEADER = struct.Struct("<8sII")  # magic, schema version, records dropped because the disk was full
HEAD = struct.Struct("<IHH")  # size, kind, code

REQUEST = struct.Struct("<IHHII")  # size, kind, code=0, ref, length of engine id in bytes; then engine id + client id
SPAN = struct.Struct("<IHHIIqqq")  # size, kind, Span code, ref, n, queued_ns, start_ns, end_ns
COUNTS = struct.Struct("<IHHIIIIq")  # size, kind, Outcome code, ref, prompt, output, cached tokens, at_ns
STEP = struct.Struct("<IHHIIIIIIqqI4x")  # size, kind, code=StepFlag, seq, running, waiting, free KV blocks,
#                                        padded batch (0 = none), entries, thread CPU ns, schedule start ns,
#                                        involuntary context switches of the engine thread so far
ENTRY = struct.Struct("<IIIII")  # ref, tokens in this step, computed before, cached tokens, EntryFlag
EMIT = struct.Struct("<IHHIIq")  # size, kind, code=0, step seq, entries, at_ns
EMISSION = struct.Struct("<II")  # ref, new tokens
JSON = struct.Struct("<IHHq")  # size, kind, length in bytes modulo 8 padding in code, at_ns; then UTF-8 JSON
BLOB = struct.Struct("<IHHQ")  # size, kind, code: the kind's own; length of the payload in bytes; then the payload


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1  # names a request: its small number in this file (ref), the engine's id, the client's id
    SPAN = 2  # one activity of one request, one step or the process
    COUNTS = 3  # how a request ended: token counts and outcome
    STEP = 4  # what the scheduler decided for one step, with an entry a request
    EMIT = 5  # which requests got how many tokens from one step
    JSON = 6  # anything else: process description, settings, hooks that are missing, a warning
    BLOB = 7  # load generators: one request's wire record (see loadgen)
    END = 8  # the process closed the file itself (absent after a kill)


class Span(IntEnum):
    """What a SPAN frame stamps. ``ref`` is a request below 100, a step's sequence number from 100, 0 from 200.

    ``queued_ns`` is when work that waits for a pool was submitted, and equals ``start_ns`` elsewhere.
    ``n`` on DETOKENIZE and EGRESS is the request's output tokens so far, this chunk's included, so that a chunk
    joins the emission that made it by counting.
    """

    # API server; ref = request
    INGRESS = 1  # bytes of the request first seen by the application .. handed to the engine client
    TEMPLATE = 2  # chat template
    TOKENIZE = 3  # text -> ids
    HANDOFF = 4  # call that sends the request to the engine process (or puts it on the engine's queue)
    OUTPUT_RECEIVE = 5  # engine output that holds the request's tokens: received .. processing starts (n = tokens)
    DETOKENIZE = 6  # queued: batch processing starts; start .. end: this request's ids -> text, stop checks
    EGRESS = 7  # start: chunk handed to the HTTP layer; end: write call returned; queued: formatting starts
    # engine core; ref = request
    CORE_RECEIVE = 20  # engine's input thread has the message .. it is on the engine's input queue
    CORE_ADD = 21  # engine loop takes it from there .. it is in the scheduler's queue
    PREEMPT = 22  # evicted (start = end)
    # steps; ref = step sequence number
    LOOP = 100  # one iteration of the engine loop
    SCHEDULE = 101
    EXECUTE = 102  # executor call: dispatched .. its result is back in the engine
    SAMPLE_CALL = 103  # second executor call, where sampling is separate: dispatched .. result back
    UPDATE = 104  # scheduler told of the sampled tokens; finished requests leave
    OUTPUT_PUT = 105  # engine outputs put on their way (queue of the sending thread)
    OUTPUT_SEND = 106  # sending thread: encode and send
    WORKER = 110  # worker has the step .. worker's answer is written
    INPUT_PREP = 111  # inputs built and copied
    FORWARD = 112  # model forward; n = 1: device events, 0: wall time of the call on the host
    SAMPLING = 113  # logits -> tokens, on the host's clock
    KERNEL_BUSY = 114  # sampled steps: start 0, end = nanoseconds in which a kernel ran
    HOST_LAUNCH = 115  # host's time inside the forward call, where FORWARD comes from device events
    # process; ref = 0
    LOOP_LAG = 200  # event-loop lag sample: queued = due, start = end = when it ran
    CANARY = 201  # fixed piece of CPU work
    CANARY_DEVICE = 202  # fixed piece of device work
    GC = 203  # a garbage collection; n = generation
    CORE_WAIT = 204  # a woken thread waited for a core, as the kernel counts it; n = CoreThread


class CoreThread(IntEnum):
    """The n of a CORE_WAIT: which thread of its process waited."""

    LOOP = 0  # API server: the event loop
    POOL = 1  # API server: a thread of the pool that renders templates and tokenizes
    INPUT = 2  # engine: the thread that receives requests; its loop, woken from idleness, where there is no such thread
    OUTPUT = 3  # engine: the thread that sends outputs


class StepFlag(IntFlag):
    """The code of a STEP frame."""

    ASYNC = 1  # scheduled before the step before it had finished (asynchronous scheduling is on)
    EMPTY = 2  # no token scheduled
    GRAPH = 4  # ran as a captured graph


class EntryFlag(IntFlag):
    """The flags of a step's entry."""

    PROMPT = 1  # carries prompt tokens (prefill), else decode
    LAST_CHUNK = 2  # the last chunk of its prompt: this step makes the first token
    RESUMED = 4  # was preempted before and runs again
    PREEMPTED = 8  # no tokens here: evicted while this step was scheduled


class Outcome(IntEnum):
    """How a request ended, as the engine (COUNTS) or the client saw it."""

    OK = 0  # stopped by length or stop condition, complete
    REFUSED = 1  # connection refused or unreachable
    TIMEOUT = 2  # no complete answer within the time allowed
    CUT = 3  # connection closed before the answer was complete
    HTTP_4XX = 4
    HTTP_5XX = 5
    MALFORMED = 6  # not HTTP, not SSE, not JSON, or an error object in the stream
    ABORTED = 7  # cancelled (the client went away, or the run was stopped)
    WRONG_LENGTH = 8  # complete, but no token at all
    TLS = 9  # TLS handshake failed
    UNSENT = 10  # never issued (the run ended first)
    LOST = 11  # was in flight when the recording process died
    STALLED = 12  # its stream had begun, then no token came for as long as was allowed
    ABANDONED = 13  # never issued: an earlier turn of its conversation failed
