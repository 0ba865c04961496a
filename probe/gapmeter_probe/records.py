"""The record types that probes and the load tester write. This module is the schema.

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
#                                        padded batch (0 = none), entries, 0, schedule start ns, 0 (older probes:
#                                        the engine thread's CPU ns and involuntary context switches so far)
ENTRY = struct.Struct("<IIIII")  # ref, tokens in this step, computed before, cached tokens, EntryFlag
EMIT = struct.Struct("<IHHIIq")  # size, kind, code=0, step seq, entries, at_ns
EMISSION = struct.Struct("<II")  # ref, new tokens
JSON = struct.Struct("<IHHq")  # size, kind, length in bytes modulo 8 padding in code, at_ns; then UTF-8 JSON
DEVICE = struct.Struct("<IHHII10q")  # size, kind, code=0, step seq, anchor number; then for each of DEVICE_PARTS
#                                    host_ns (0: not marked), device_ns
BLOB = struct.Struct("<IHHQ")  # size, kind, code: the kind's own; length of the payload in bytes; then the payload


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1  # names a request: its small number in this file (ref), the engine's id, the client's id
    SPAN = 2  # one activity of one request, one step or the process
    COUNTS = 3  # how a request ended: token counts and outcome
    STEP = 4  # what the scheduler decided for one step, with an entry a request
    EMIT = 5  # which requests got how many tokens from one step
    JSON = 6  # anything else: process description, settings, hooks that are missing, a warning
    BLOB = 7  # load tester: one request's wire record (see loadgen)
    END = 8  # the process closed the file itself (absent after a kill)
    DEVICE = 9  # when a device was where in a step, on its own clock


# What of a step a DEVICE frame stamps: ``host_ns``, when the host put the mark onto the device's stream, and
# ``device_ns``, when the device came to it, in its own nanoseconds since the frame's anchor. Anchors are JSON records:
# ``number``, ``host_ns`` give or take ``half_width_ns``, and ``since_ns``, the device's time since the anchor before.
DEVICE_PARTS = ("input", "forward", "forward_end", "sampled", "copied")


class Span(IntEnum):
    """What a SPAN frame stamps. ``ref`` is a request below 100, a step's sequence number from 100, 0 from 200.

    ``queued_ns`` is when work that waits for a pool was submitted, and equals ``start_ns`` elsewhere.
    ``n`` on DETOKENIZE and EGRESS is the request's output tokens so far, this chunk's included, so that a chunk
    joins the emission that made it by counting. On TEMPLATE and TOKENIZE it is the ns until the event loop went on with
    the request, where a pool did it.
    """

    # API server; ref = request
    INGRESS = 1  # the request's last bytes seen by the application .. handed to the engine client
    TEMPLATE = 2  # chat template
    TOKENIZE = 3  # text -> ids
    HANDOFF = 4  # call that sends the request to the engine process (or puts it on the engine's queue)
    OUTPUT_RECEIVE = 5  # engine output that holds the request's tokens: received .. processing starts (n = tokens)
    DETOKENIZE = 6  # queued: batch processing starts; start .. end: this request's ids -> text, stop checks
    HTTP = 8  # of INGRESS: last bytes .. the application is called
    APPLICATION = 9  # of INGRESS: routing, JSON, validation
    REQUEST = 10  # of INGRESS: the engine's request is made from prompt and parameters
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
    FORWARD = 112  # model forward; n = 0: wall time of the call on the host, 1: made by analysis, as the next
    SAMPLING = 113  # logits -> tokens, on the host's clock
    HOST_LAUNCH = 115  # host's time inside the forward call, where a device computes
    # made by analysis from DEVICE frames, on the host's clock; no probe writes them
    DEVICE_STEP = 116  # first mark .. last mark; n = half the width to which its place on the host's clock is known
    DEVICE_INPUT = 117  # input kernels, from the launch of the forward on (until then the device waits for that)
    DEVICE_SAMPLING = 118  # logits -> tokens
    DEVICE_COPY = 119  # tokens copied to the host
    # process; ref = 0
    LOOP_LAG = 200  # load tester: event-loop lag sample: queued = due, start = end = when it ran
    CANARY = 201  # load tester: fixed piece of CPU work
    CORE_WAIT = 204  # older probes: a woken thread waited for a core
    KERNELS = 205  # sampled windows: a stretch in which kernels ran without a pause; n = kernels


class StepFlag(IntFlag):
    """The code of a STEP frame."""

    ASYNC = 1  # scheduled before the step before it had finished (asynchronous scheduling is on)
    EMPTY = 2  # no token scheduled


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
    LOST = 11  # was in flight when the recording process died
    STALLED = 12  # its stream had begun, then no token came for as long as was allowed
    ABANDONED = 13  # never issued: an earlier turn of its conversation failed
