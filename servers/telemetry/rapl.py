"""CPU energy as the processor counts it: the kernel's powercap tree (RAPL), in µJ, wrapping at a range of its own."""

from __future__ import annotations

from pathlib import Path

from gapmeter.servers.telemetry.source import Absent, ReadFailed, Row

POWERCAP = Path("/sys/class/powercap")


class Rapl:
    """Every domain's counter. ``about`` has each one's name, its parent's, and where it wraps."""

    name = "rapl"

    def __init__(self, domains: dict[str, Path]) -> None:
        self._counters = {domain: path / "energy_uj" for domain, path in domains.items()}
        self.about: Row = {
            "domains": [
                {
                    "domain": domain,
                    "name": (path / "name").read_text().strip(),
                    "range_uj": int((path / "max_energy_range_uj").read_text()),
                }
                for domain, path in domains.items()
            ]
        }

    def read(self) -> list[Row]:
        try:
            return [{"domain": d, "energy_uj": int(path.read_text())} for d, path in self._counters.items()]
        except (OSError, ValueError) as error:
            raise ReadFailed(f"RAPL: {error}") from error


def open_rapl(root: Path = POWERCAP) -> Rapl:
    """The domains ``intel-rapl:N`` (packages) and ``intel-rapl:N:M`` (parts of one); AMD's carry the same name.

    Raises Absent where there are none, or they may not be read.
    """
    domains = {path.name: path for path in sorted(root.glob("intel-rapl:*")) if (path / "energy_uj").exists()}
    if not domains:
        raise Absent("the CPU's energy counter (RAPL) is not there: usual in virtual machines and containers")
    try:
        rapl = Rapl(domains)
        rapl.read()
    except PermissionError:
        raise Absent(f"the CPU's energy counter may not be read: as root, chmod -R a+r {root}") from None
    except (OSError, ValueError, ReadFailed) as error:
        raise Absent(f"the CPU's energy counter cannot be read: {error}") from error
    return rapl
