"""Results are types: what a run says of itself and what it found, as its files hold it."""

from gapmeter.analysis.results.codec import Ends, NotReadable, Number, Result, ResultFile
from gapmeter.analysis.results.manifest import Manifest, ManifestBase
from gapmeter.analysis.results.run import RunBrief, RunResult

__all__ = ["Ends", "Manifest", "ManifestBase", "NotReadable", "Number", "Result", "ResultFile", "RunBrief", "RunResult"]
