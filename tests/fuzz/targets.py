"""What strangers may send or hand over, and the code of ours that reads it first: one table, walked by two fuzzers.

``make fuzz`` drives it with atheris, ``tests/test_fuzz.py`` with hypothesis. Whatever an input is, it ends in a value
or in one of our errors, each a sentence, in bounded time and memory.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import random
import shlex
import shutil
import socket
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pandas as pd
import pyarrow as pa

from gapmeter.analysis.requests.definitions import chunks
from gapmeter.analysis.results import NotReadable
from gapmeter.analysis.results.manifest import read_manifest
from gapmeter.cli import main
from gapmeter.errors import MEANING, OK, UserError
from gapmeter.loadgen.locust.protocol import Hello, Malformed, MasterMessage, Order, Result, Seal, WorkerMessage, read
from gapmeter.loadgen.locust.slice_run import Report
from gapmeter.loadgen.plan import NotPlan, Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.records import Outcome, read_records
from gapmeter.records.answers import read_answers
from gapmeter.records.folder import PARTS, write_json
from gapmeter.records.reader import NotRecords
from gapmeter.records.request import FINISHED, Block, Ints
from gapmeter.records.stream import events, parse_answer
from gapmeter.runs.archive import archive, unpacked
from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.read import load_points, load_scenario
from gapmeter.study.target import served_models
from tests.fuzz.feed import ENDED, feed
from tests.kit.streams import comparable, read_together, same

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
SCENARIOS = sorted((HERE.parents[1] / "scenarios").glob("*.yaml"))
_MOST_WORDS = 3_000  # of a sentence


@dataclass(frozen=True, slots=True)
class Target:
    """Who reads it, and valid examples of it.

    ``errors``: ours, which an input may end in. ``seconds``: what one may take; ``examples``: how many the tests try.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    examples: int = 300
    seconds: float = 10.0

    def try_input(self, data: bytes) -> None:
        """Raises whatever an input must not end in."""
        try:
            self.read(data)
        except self.errors as error:
            if not 0 < len(str(error)) < _MOST_WORDS:
                raise AssertionError(f"no sentence: {str(error)[:_MOST_WORDS]}") from error


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="gapmeter-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)


def _scratch() -> Path:
    """A folder for what is read; in memory where there is such a place, gone with the process."""
    return Path(_kept().name)


def _file(name: str, data: bytes) -> Path:
    path = _scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@functools.cache
def golden(key: str) -> Path:
    """The run that ``tests/golden`` keeps by that name, unpacked; nobody changes it."""
    folder = _scratch() / "golden" / key
    folder.mkdir(parents=True)
    with tarfile.open(GOLDEN / f"{key}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    (run,) = folder.iterdir()
    return run


def _answers() -> list[bytes]:
    return [path.read_bytes() for path in sorted((HERE / "corpus").iterdir())]


def _read_answer(data: bytes) -> None:
    """The client and the parser: an outcome that a broken server's client may have, the same cut and whole."""
    at = random.Random(zlib.crc32(data))
    edges = sorted(at.randrange(len(data) + 1) for _ in range(at.randrange(12)))
    pieces = [data[start:end] for start, end in pairwise([0, *edges, len(data)]) if end > start]
    ends = bool(at.getrandbits(1))
    cut, at_once = feed(pieces, ends=ends), feed(pieces and [data], ends=ends)
    for record in (cut, at_once):
        assert record.outcome in ENDED, record.outcome
        said_by_its_body = record.outcome in (Outcome.HTTP_4XX, Outcome.HTTP_5XX)
        unended = record.outcome is Outcome.OK and record.error.endswith("behind the answer's end mark")
        assert not unended or b"[DONE]" in record.body
        assert bool(record.error) == (record.outcome is not Outcome.OK or unended) or said_by_its_body
        answer = parse_answer(record)
        assert same(read_together([record])[0], answer)
        assert len(answer.token_ns) == int(answer.chunk_tokens.sum())
        assert 0 <= answer.hidden_tokens < (answer.output_tokens or 1)
        counts = (getattr(answer, name) for name in ("prompt_tokens", "output_tokens", "cached_tokens"))
        assert all(count is None or 0 <= count < 1 << 48 for count in counts)  # sums of them are numbers of a table
        list(chunks(record))
        kept = {"said": [f"{answer.finish_reason} {answer.error}"], "metrics": [answer.request_metrics]}
        pa.Table.from_pandas(pd.DataFrame(kept))
        assert answer.request_metrics != {}  # of which Parquet has no column
    # How much of a broken answer was read before it broke depends on the pieces; that it broke does not.
    assert (cut.outcome is Outcome.MALFORMED) == (at_once.outcome is Outcome.MALFORMED)
    if cut.outcome is not Outcome.MALFORMED:
        assert (cut.outcome, cut.status, cut.body) == (at_once.outcome, at_once.status, at_once.body)
        assert comparable(parse_answer(cut)) == comparable(parse_answer(at_once))
        assert [text for _, text in events(cut)] == [text for _, text in events(at_once)]


class _Server:
    """A server that answers whatever is asked with the same bytes, then closes."""

    def __init__(self) -> None:
        self.answer = b""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection, contextlib.suppress(OSError):
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(65_536)):
                    asked += more
                connection.sendall(self.answer)


_server = functools.cache(_Server)
_attached = functools.cache(
    lambda url: load_scenario("smoke", ["server.engine=attach", f"server.url={url}", "server.ready_timeout=2s"], {})
)


def _models() -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    listed = {
        "object": "list",
        "data": [{"id": "a/b-7b", "object": "model", "owned_by": "x"}, {"id": "c", "root": None}],
    }
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/v1/models\r\n\r\n"
    return [head + json.dumps(listed).encode(), head + b'{"data": []}', moved, b"HTTP/1.0 401 No\r\n\r\n{}"]


def _read_models(data: bytes) -> None:
    server = _server()
    server.answer = data
    url, models = served_models(_attached(server.url), None)
    assert url == server.url
    assert all(model.isprintable() for model in models)


def _manifests() -> list[bytes]:
    folders = [golden(key) for key in ("attached", "simulated", "workers", "sweep", "capacity", "conversations")]
    return [(folder / "manifest.json").read_bytes() for folder in folders]


def _read_manifest(data: bytes) -> None:
    manifest = read_manifest(_file("run/manifest.json", data).parent)
    assert manifest.asked.to_dict()
    write_json(_scratch() / "again.json", manifest.to_json())


def _records() -> list[bytes]:
    return [path.read_bytes() for key in ("attached", "failures", "simulated") for path in golden(key).rglob("*.gap")]


def _read_records(data: bytes) -> None:
    path = _file("worker-0.gap", data)

    def take(data: bytes, codes: Ints, begins: Ints, ends: Ints) -> None:
        ended = codes == FINISHED
        read_answers(Block.of(data, begins[ended], ends[ended]))

    with contextlib.suppress(NotRecords):
        read_records(path, take)
    for record in read_records(path).requests():
        parse_answer(record)


def _archives() -> list[bytes]:
    run = golden("attached")
    packed = _scratch() / "x.tar.gz"
    packed.unlink(missing_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):
        made = archive(run, packed).read_bytes()
    return [made, gzip.decompress(made)]


def _read_archive(data: bytes) -> None:
    with unpacked(_file("archive", data)) as folder:
        assert len(list(folder.rglob("*"))) < 1_000


def _scenarios() -> list[bytes]:
    texts = [path.read_bytes() for path in SCENARIOS]
    names = [path.stem for path in SCENARIOS]
    return [*texts, *(json.dumps(load_scenario(name, [], {}).to_dict()).encode() for name in names)]


def _read_scenario(data: bytes) -> None:
    path = _file("scenario.yaml", data)
    try:
        load_points(path, (), {})
        scenario = load_scenario(path, (), {})
    except ScenarioError as error:
        if path.name not in str(error):
            raise AssertionError(f"of which file? {error}") from error
        raise
    assert scenario.digest()


_SEAL = Seal("secret", "nonce", "worker")
_ORDER = Order(0, 2, "http://127.0.0.1:8000", "asyncio", "0123456789ab", 4096, 8089)
_RESULT = Result(["a sentence"], 1, Report(3, 2, 2, 1, {"ttft": "HISTFAAAACV42pJpmSzMwMDAxQABzFCaEUoz2X+AMIwBAQAA"}))


def _messages() -> list[bytes]:
    words: list[dict[str, Any]] = [
        {"word": "arm", "order": asdict(_ORDER)}, {"word": "refuse", "why": "a version"}, {"word": "start", "t0_ns": 5},
        {"word": "clock", "sent_ns": 7}, {"word": "stop"},
    ]  # fmt: skip
    told = [json.dumps(Seal("secret", "nonce", "master").mark(word)).encode() for word in words]
    return [*told, *(msgpack.dumps(word) for word in words), json.dumps(asdict(_RESULT)).encode()]


def _read_message(data: bytes) -> None:
    """What a worker takes of its master, marked or not, and the master of its worker."""
    with contextlib.suppress(Malformed):
        read(Result, data)
    try:
        message = json.loads(data) if data[:1] in b"{[" else msgpack.loads(data, raw=False, strict_map_key=False)
    except (
        ValueError,
        RecursionError,
        TypeError,
        msgpack.UnpackException,
    ):  # which Locust's reader does not let through
        return
    _SEAL.is_theirs(message)
    for kind in (WorkerMessage, Report):
        with contextlib.suppress(Malformed):
            read(kind, message)
    if isinstance(message, dict):
        with contextlib.suppress(Malformed):
            Hello.read(message)
    MasterMessage.read(message)


def _plans() -> list[bytes]:
    made = []
    for name in ("smoke", "dialogue"):
        scenario = load_scenario(name, ["load.requests=4", "load.warmup=0s"], {})
        plan = make_plan(scenario, None, model_name="m")
        plan.save(path := _scratch() / "plan.npz")
        made.append(path.read_bytes())
    return made


def _read_plan(data: bytes) -> None:
    plan = Plan.load(_file("plan.npz", data))
    assert len(plan.digest()) == 12
    assert [plan.body(index) for index in range(len(plan))]


_OF_ALL = (
    "report {run}", "verify {run}", "runs --runs {runs}", "runs --runs {runs} --json",
    "sql 'SELECT * FROM runs' --runs {runs}", "archive {run} -o {tmp}/run.tar.gz",
    "compare {run} {whole} --runs {tmp}/compared", "compare {whole} {run} --force --runs {tmp}/compared",
)  # fmt: skip
_OF_ONE = (
    "report {run} --definitions --verbose", "explain {run} --group 'ttft_ms > 1'",
    "explain {run} --group 'prompt_tokens > 30' --metric e2e --json", "sql 'FROM requests' --runs {runs} --csv",
    "export {run} --csv {tmp}/csv", "export {run} --prometheus {tmp}/run.prom",
    "export {run} --perfetto {tmp}/trace.json.gz", "compare {whole} {run},{run} --runs {tmp}/compared",
)  # fmt: skip


def _folders() -> list[bytes]:
    return [_packed(golden(key)) for key in ("attached", "failures", "simulated", "sweep", "capacity")]


def _packed(run: Path) -> bytes:
    """A run's folder without hashes, by which every change of a record would be found at once.

    Of several runs it has what analysis made of each: the folders of single ones have the records.
    """
    of_several = not (run / "requests").exists()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(path for path in run.rglob("*") if path.is_file()):
            inside = path.relative_to(run)
            if path.suffix == ".hlog" or (of_several and path.parent.name in PARTS):
                continue

            data = path.read_bytes()
            if path.name == "manifest.json":
                data = json.dumps({key: value for key, value in json.loads(data).items() if key != "files"}).encode()
            info = tarfile.TarInfo(f"{run.name}/{inside}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def _read_folder(data: bytes) -> None:
    """A stranger's run, given to the commands that read runs: the input decides which."""
    tmp = Path(tempfile.mkdtemp(dir=_scratch()))
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(tmp / "runs", filter="data")
        runs = [path for path in (tmp / "runs").iterdir() if path.is_dir()]
    except (tarfile.TarError, OSError, ValueError, EOFError, FileNotFoundError):
        shutil.rmtree(tmp)
        return  # nobody has such a folder
    try:
        if runs:
            commands = (*_OF_ALL, *_OF_ONE) if (runs[0] / "requests").exists() else _OF_ALL
            _command(random.Random(zlib.crc32(data)).choice(commands), runs[0], tmp)
    finally:
        shutil.rmtree(tmp)


def _command(words: str, run: Path, tmp: Path) -> None:
    typed = words.format(run=run, runs=run.parent, tmp=tmp, whole=golden("attached"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(typed))
    said = err.getvalue()
    assert code in MEANING, code
    assert "Traceback" not in said, said
    assert code == OK or said.rstrip().rpartition("\n")[2].lstrip().startswith(f"exit={code} "), said


TARGETS: dict[str, Target] = {
    "answers": Target(_answers, _read_answer, examples=900),
    "models": Target(_models, _read_models, (UserError,)),
    "manifests": Target(_manifests, _read_manifest, (NotReadable,)),
    "records": Target(_records, _read_records, (NotRecords, ValueError), examples=150),
    "archives": Target(_archives, _read_archive, (UserError,), examples=150),
    "scenarios": Target(_scenarios, _read_scenario, (ScenarioError,), examples=120, seconds=60.0),
    "messages": Target(_messages, _read_message, (Malformed,)),
    "plans": Target(_plans, _read_plan, (NotPlan,)),
    "folders": Target(_folders, _read_folder, examples=25, seconds=60.0),
}
