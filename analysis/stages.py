"""The stages of a ledger: their order on the timeline, who owns each, and how each is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One column of the ledger.

    ``owner`` is who could make it shorter; ``group`` the coarse bucket it is summed into (every stage but the
    residual is in exactly one); ``kind`` how most of its time is known: measured, transit or estimated.
    """

    name: str
    owner: str
    group: str
    kind: str
    meaning: str


_TABLE = """
retry         | capacity    | queueing     | measured  | attempts that failed, and the pauses before the next
generator_lag | load tester | load_tester  | measured  | due until the request's bytes were handed to the socket
connect       | network     | network      | measured  | a new connection, where one was needed
network_in    | network     | network      | transit   | until the server application saw the request
accept_wait   | API server  | framework    | measured  | the server's event loop was at work elsewhere
ingress       | API server  | framework    | measured  | HTTP, JSON, validation, request object
template      | API server  | tokenization | measured  | chat template rendered
tokenize      | API server  | tokenization | measured  | text to ids
handoff       | framework   | framework    | transit   | API server to engine process
core_wait     | capacity    | queueing     | measured  | a thread of the server could run, others had its core
lock_wait     | framework   | framework    | measured  | another thread of the process held the interpreter
engine_wait   | framework   | framework    | measured  | on the engine's input queue, the engine inside a step
queue         | capacity    | queueing     | measured  | in the scheduler's queue until first scheduled
other_step    | capacity    | queueing     | measured  | scheduled, behind a step of others
prefill       | GPU         | gpu_prefill  | measured  | forward of own steps that carry its prompt
decode        | GPU         | gpu_decode   | measured  | forward of own steps that make its tokens
interference  | capacity    | queueing     | estimated | part of own decode steps that others' prompts took
launch_gap    | framework   | framework    | measured  | the GPU waited for the host inside an own step
input_prep    | framework   | framework    | measured  | inputs of own steps built
sampling      | framework   | framework    | measured  | logits to token in own steps
scheduling    | framework   | framework    | measured  | schedule, update, loop, executor call, where not hidden
preempted     | capacity    | queueing     | measured  | evicted until scheduled again
output        | framework   | framework    | transit   | token sampled until the API server has it
detokenize    | API server  | tokenization | measured  | ids to text, stop checks
egress        | API server  | framework    | measured  | formatting, waiting for the event loop, write
network_out   | network     | network      | transit   | until the client's kernel had the bytes
"""

STAGES: tuple[Stage, ...] = tuple(
    Stage(*(cell.strip() for cell in line.split("|"))) for line in _TABLE.strip().splitlines()
)
UNEXPLAINED, UNEXPLAINED_OWNER = "unexplained", "nobody yet"
OF_THE_CLIENT = frozenset({"retry", "generator_lag", "connect"})  # stamped without any server's help
BY_NAME: dict[str, Stage] = {stage.name: stage for stage in STAGES}
STAGE_NAMES = (*BY_NAME, UNEXPLAINED)  # in the order of the timeline, the remainder last
GROUPS: tuple[str, ...] = (
    "queueing", "tokenization", "framework", "gpu_prefill", "gpu_decode", "network", "load_tester",
)  # fmt: skip

# Okabe-Ito; a color means an owner, the same in report and trace.
OWNER_COLORS: dict[str, str] = {
    "load tester": "#6B6B6B",
    "network": "#56B4E9",
    "API server": "#CC79A7",
    "framework": "#E69F00",
    "capacity": "#D55E00",
    "GPU": "#0072B2",
    "nobody": "#BBBBBB",
}
DECODE_COLOR = "#009E73"


def color(stage: str) -> str:
    """The color of a stage: its owner's, with decode apart from prefill."""
    if stage == "decode":
        return DECODE_COLOR
    return OWNER_COLORS[BY_NAME[stage].owner if stage in BY_NAME else "nobody"]


def owner_of(stage: str) -> str:
    """The owner's key, as summary.json has it; for people see ``owner_words``."""
    return BY_NAME[stage].owner if stage in BY_NAME else UNEXPLAINED_OWNER


def owner_words(owner: str, device: str) -> str:
    """An owner's name for people; ``device`` is what computes the forwards: GPU, CPU, or a word for several.

    ``GPU`` is the owner's key in summary.json wherever the forwards ran. On a CPU the API server and the framework
    compute too, so there the owner is the forward pass, not the processor. ``capacity`` is the key of what more
    replicas, cores or slots would shorten; people read that word as the rate that a server holds.
    """
    if owner == "capacity":
        return "contention"
    if owner != "GPU":
        return owner
    return "CPU forward pass" if device == "CPU" else device


def column(stage: str) -> str:
    """The ledger's column for a stage, in nanoseconds."""
    return f"{stage}_ns"
