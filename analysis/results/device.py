"""What the device and the server's processes did: telemetry and roofline."""

from __future__ import annotations

from collections.abc import Mapping

from gapmeter.analysis.results.codec import Number, Result, left_out


class Spread(Result):
    """Of the samples in the measured window."""

    mean: float
    min: float
    max: float


class SourceSamples(Result):
    """How many samples of a source lie in the window, and what is missing. ``absent``: why there are none at all."""

    absent: str | None
    samples: int
    expected: int | None
    missed: int
    gaps: int
    longest_gap_s: Number
    why: str | None


class SamplerState(Result):
    """The sampler itself. Not ``complete``: it was ended before the run."""

    hz: Number
    cpu_share: Number
    nice: int | None
    cores: tuple[int, ...] | None
    complete: bool
    broken_lines: int


class PcieLink(Result):
    """GB/s in each direction, and what the link carries in one."""

    rx_gb_s: Spread | None = left_out()
    tx_gb_s: Spread | None = left_out()
    link_gb_s: Number


class GpuSamples(Result):
    """One GPU. ``server``: whether the server is known to use it; ``throttled``: share of the samples by reason.

    ``sm_fell_share``: by how much the SM clock of the last fifth lies below that of the first.
    """

    gpu: int
    name: str | None
    server: bool
    power_w: Spread | None
    sm_mhz: Spread | None
    memory_mhz: Spread | None
    temperature_c: Spread | None
    memory_used_gib: Spread | None
    memory_total_gib: Spread | None
    busy_share: Spread | None
    memory_busy_share: Spread | None
    throttled: Mapping[str, float] | None
    sm_fell_share: Number
    pcie: PcieLink | None


class ProcessSamples(Result):
    """One process of the server: CPU in cores and context switches per second, over all that was sampled.

    So one that was there for a while only has fewer than it used meanwhile; ``cpu_cores_max`` has its most.
    ``stopped_s``: how long each stop by a signal or a debugger lasted, to a sample; left out where there was none.
    """

    pid: int
    name: str
    cpu_cores: float
    cpu_cores_max: Number
    rss_gib: float
    threads: int
    voluntary_per_s: float
    involuntary_per_s: float
    samples: int
    stopped_s: tuple[float, ...] | None = left_out()


class PageTime(Result):
    """How long a page of /metrics took to come."""

    p50: float
    max: float


class EngineSamples(Result):
    """What the engine says of itself under /metrics."""

    running: Spread | None
    waiting: Spread | None
    kv_used_share: Spread | None
    preemptions: Number
    prefix_hit_share: Number
    took_ms: PageTime


class EnergyWindow(Result):
    """Joules over the measured window. ``method``: ``counter`` (the device counts it) or ``power`` (summed samples).

    ``low_j`` and ``high_j`` bound it where a counter was read: it stood still at the last sample before the window and
    the first after it at the outside, at the first and last inside it at least. ``idle_w`` is the power of the same
    devices before the load, server up, ``idle_j`` that over the window, ``idle_share`` the part that would have been
    used without a request, at most 1. ``parts_j`` by device. ``source`` says in words what was read.
    """

    joules: float
    low_j: Number
    high_j: Number
    seconds: float
    method: str
    source: str
    idle_w: Number
    parts_j: Mapping[str, float]
    idle_j: Number
    idle_share: Number


class KernelUse(Result):
    """Of ``steps`` whose forward lies whole in a sampled window.

    ``busy_share``: any kernel ran, of all forwards that were measured; one that was not sampled counts with the mean of
    its kind, since the profiler made the sampled ones longer. ``overlap``: summed kernel time over that union, above 1
    where kernels ran side by side; ``communication_share`` of the sum is NCCL's and other collectives'. ``copies_ms``:
    copies and fills in the windows, all together.
    """

    steps: int
    busy_share: float
    overlap: float
    communication_share: float
    copies_ms: float


class DeviceUse(Result):
    """What a device did by its own marks, in shares of the window; see analysis.device.use.

    ``waiting_share``: idle while the engine was at a step, so that it waited for its host. ``launching_share``: of the
    forwards' time, during which the host was still launching them, an upper bound on gaps between their kernels.
    ``half_width_us``: how far off a mark may be on the host's clock, the median and the most; ``drift_ppm`` between the
    clocks. ``untimed_steps``: of which the device did not tell its times.
    """

    busy_share: float
    idle_share: float
    waiting_share: float
    input_share: float
    forward_share: float
    sampling_share: float
    copy_share: float
    launching_share: Number
    steps: int
    untimed_steps: int
    half_width_us: float
    half_width_us_max: float
    drift_ppm: Number
    kernels: KernelUse | None


class Utilisation(Result):
    """How busy the device was; see analysis.device.telemetry."""

    nvml_busy_share: Number
    server_cpu_cores: Number
    server_cores: int | None
    server_cpu_share: Number
    forward_share_of_window: Number
    forward_share_of_step: Number
    kernel_share_of_forward: Number
    forward_by_device: bool
    device: DeviceUse | None = left_out()


class Telemetry(Result):
    """The samples beside a run, over its measured window."""

    window_s: float
    sources: Mapping[str, SourceSamples]
    sampler: SamplerState
    gpus: tuple[GpuSamples, ...]
    processes: tuple[ProcessSamples, ...]
    engine: EngineSamples | None
    energy: EnergyWindow | None
    utilisation: Utilisation


class Experts(Result):
    """The part of a mixture of experts of which a token uses ``per_token`` out of ``count``."""

    parameters: int
    bytes: float
    count: int
    per_token: int


class Weights(Result):
    """A model as a roofline needs it; see machine/roofline."""

    parameters: int
    step_parameters: int
    step_bytes: float
    head_parameters: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    attention_width: int
    kv_bytes: float
    sliding_layers: int
    window: int | None
    precision: str
    experts: Experts | None
    source: str


class AchievedShare(Result):
    """Achieved over possible, with its 95 % interval; ``achieved`` in GB/s or TFLOPS."""

    share: float
    low: float
    high: float
    achieved: float
    steps: int


class PeakRate(Result):
    """A device's peak, and how low it was seen too."""

    peak: float
    low: float


class RooflineDevice(Result):
    """What the device can do, and who says so."""

    name: str
    source: str
    llc_bytes: int | None
    bandwidth_gb_s: PeakRate
    cached_gb_s: PeakRate | None
    tflops: PeakRate | None


class ForwardTime(Result):
    """Of a step's forward, in ms."""

    mean: float
    p50: float


class LeastTime(Result):
    """Of a token at full bandwidth, in ms."""

    mean: float
    max: float


class DecodeRoofline(Result):
    """Decode-only steps against the bandwidth. ``bound``: memory bandwidth, cache bandwidth, compute or neither."""

    mbu: AchievedShare
    mbu_of_memory: float
    mfu: AchievedShare | None
    cache_resident: bool
    bandwidth_gb_s: float
    batch_mean: float
    kv_tokens_mean: float
    bytes_mean: float
    weight_bytes: float
    forward_ms: ForwardTime
    itl_least_ms: LeastTime
    bound: str


class PrefillRoofline(Result):
    """Steps with prompts against the peak of multiplications; ``why`` there is no MFU."""

    mfu: AchievedShare | None
    why: str | None
    tflops: float
    mixed: bool
    steps: int
    tokens_mean: float
    forward_ms: ForwardTime
    bound: str | None


class Binding(Result):
    """What binds, its share of the mean answer, what binds without a queue, and the sentence that says why.

    ``resource`` is "unmeasured" without a ledger. ``parts`` are the shares of all resources; ``unmeasured`` what could
    not be told apart.
    """

    resource: str
    share: Number
    behind: str | None
    parts: Mapping[str, float]
    unmeasured: tuple[str, ...]
    why: str


class Roofline(Result):
    """Shares of the device's peaks; None, with ``why``, for what is unmeasured."""

    decode: DecodeRoofline | None
    prefill: PrefillRoofline | None
    device: RooflineDevice | None
    weights: Weights | None = left_out()
    why: str | None
