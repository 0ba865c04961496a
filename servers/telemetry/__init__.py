"""What the machine and the server did while a run lasted: one process beside it that samples at fixed deadlines.

Everything it reads is somebody else's counter (NVML, RAPL, /proc, the engine's /metrics); it stamps each sample with
CLOCK_MONOTONIC and writes it as a line of JSON under the run's ``telemetry/``. What could not be read is a gap.
"""
