"""A run's folder proves its own figures, and an archive of it does so elsewhere."""

from __future__ import annotations

import errno
import fcntl
import gzip
import html
import io
import json
import math
import os
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter import errors
from gapmeter.analysis.results import Manifest, ManifestBase
from gapmeter.analysis.results.manifest import SweepManifest, SweepPoint
from gapmeter.cli import main
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.records.compression import compress
from gapmeter.records.folder import write_json
from gapmeter.runs.archive import HASHES, archive, holds_any
from gapmeter.runs.comparison import compare_folders
from gapmeter.study.sweep import analyse_points
from gapmeter.study.verify import Check, check_all, compare_file, differing, not_derived, verify

pytestmark = pytest.mark.whole_run
Copy = Callable[[], Path]
KEY = 'sk-"quoted"<and>-angled'
LONG = "environment-secret"


def failed(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.seen for check in checks if not check.ok}


def test_a_run_that_nobody_touched_holds_in_every_check(run_copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run_copy())]) == errors.OK
    said = capsys.readouterr().out.splitlines()
    assert all(line.startswith(" v ") for line in said[:-1])
    names = {line.split()[1] for line in said[:-1]}
    assert names >= {"records", "summary.json", "requests.parquet", "ledger.parquet", "report.html", "hdr"}
    assert said[-1].endswith("checks hold")


def test_a_folders_name_is_in_no_command_that_its_page_shows(
    run_copy: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_copy()
    run = run.rename(run.with_name('a "$(touch HACKED)" b'))
    assert main(["verify", str(run)]) == errors.OK
    assert main(["report", str(run)]) in (errors.OK, errors.SLO_MISSED, errors.NOT_VALID)
    page = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    assert "gapmeter explain RUN --group" in page and "touch HACKED" not in page
    assert main(["verify", str(run)]) == errors.OK


def forge_summary(run: Path) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    summary["metrics"]["ttft"]["max_ms"] *= 0.9  # a percentile may be null in so small a sample
    summary["verdict"] = "PASS" if summary["verdict"] != "PASS" else "FAIL"
    path.write_text(json.dumps(summary))


def forge_requests(run: Path) -> None:
    table = pd.read_parquet(run / "requests.parquet")
    table.loc[0, "first_token_ns"] = table.loc[0, "first_token_ns"] - 1_000_000
    table.to_parquet(run / "requests.parquet", index=False)


def forge_record(run: Path) -> None:
    path = next((run / "requests").glob("*.gap.zst"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def add_record(run: Path) -> None:
    (run / "probe" / "core-1-1.gap").write_bytes(b"")


def forge_histogram(run: Path) -> None:
    path = run / "hdr" / "ttft.hlog"
    path.write_bytes(path.read_bytes().replace(b",", b";", 1))


def forge_manifest(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["slo"][0]["limit_share"] = 0.5
    (run / "manifest.json").write_text(json.dumps(manifest))


def raise_version(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))


@pytest.mark.parametrize(
    ("tamper", "name", "says"),
    [
        (forge_summary, "summary.json", "metrics.ttft.max_ms is "),
        (forge_requests, "requests.parquet", "column first_token_ns"),
        (forge_record, "requests/worker-0.gap.zst", "was changed"),
        (add_record, "probe/core-1-1.gap", "was not there when the run ended"),
        (forge_histogram, "hdr", "ttft.hlog differs"),
        (forge_manifest, "summary.json", "slo[0].limit_share is "),
        (lambda run: (run / "ledger.parquet").unlink(), "ledger.parquet", "is missing"),
        (lambda run: (run / "hdr" / "e2e.hlog").unlink(), "hdr", "e2e.hlog is missing"),
        (lambda run: (run / "requests" / "worker-0.gap.zst").unlink(), "requests/worker-0.gap.zst", "is missing"),
        (lambda run: (run / "summary.json").write_text("{"), "summary.json", "cannot be read"),
        (lambda run: (run / "requests.parquet").write_text("no"), "requests.parquet", "cannot be read"),
        (lambda run: shutil.copy(run / "gaps.parquet", run / "more.parquet"), "more.parquet", "not of these records"),
        (lambda run: (run / "manifest.json").write_text("[]"), "manifest.json", "cannot be read"),
        (raise_version, "format", "schema_version is 99, this gapmeter reads 1"),
    ],
)  # fmt: skip
def test_what_was_tampered_with_is_named(
    run_copy: Copy, tamper: Callable[[Path], object], name: str, says: str
) -> None:
    run = run_copy()
    tamper(run)
    bad = failed(check_all(run))
    assert says in bad[name]
    assert main(["verify", str(run), "--json"]) == errors.NOT_VALID


def test_figures_of_another_state_of_the_analysis_hold_if_they_are_the_same_and_it_is_said(run_copy: Copy) -> None:
    run = run_copy()
    summary = json.loads((run / "summary.json").read_text())
    summary["made_by"]["analysis"] = "0123456789ab"
    (run / "summary.json").write_text(json.dumps(summary))
    checks = check_all(run)
    assert failed(checks) == {}
    said = {check.name: check.seen for check in checks}
    assert "analysis 0123456789ab then, " in said["versions"] and "gapmeter report recomputes them" in said["versions"]
    assert said["summary.json"] == "derived again, the same values"


def test_a_report_made_again_does_not_vouch_for_changed_records(run_copy: Copy) -> None:
    run = run_copy()
    path = next((run / "telemetry").glob("*.jsonl"))
    path.write_text(path.read_text() + "\n")
    main(["report", str(run), "--quiet"])
    assert "was changed" in failed(check_all(run))[f"telemetry/{path.name}"]


def test_a_folder_of_several_runs_is_checked_run_by_run(run_copy: Copy, tmp_path: Path) -> None:
    home = tmp_path / "several"
    for name in ("a", "b"):
        shutil.copytree(run_copy(), home / "points" / name)
    forge_summary(home / "points" / "b")
    assert failed(check_all(home)).keys() == {"points/b"}


def test_a_sweep_s_own_figures_are_made_again_from_its_points(run_copy: Copy, tmp_path: Path) -> None:
    home = RunFolder(tmp_path / "20260101-000000-smoke-sweep-aaaaaa")
    run = home.path / "points" / "001-rate=60" / "r1"
    shutil.copytree(run_copy(), run)
    values = {"load.rate": 60}
    point = SweepPoint(values=values, resolved=values, digest="a", folder="points/001-rate=60")
    of_run = Manifest.read(run)
    common = {name: getattr(of_run, name) for name in ManifestBase.model_fields}
    SweepManifest(**common, repeat=1, points=(point,), order=(((0, 0),),)).write(home.path)
    analyse_points(home)
    assert failed(check_all(home.path)) == {}
    summary = json.loads(home.summary.read_text())
    summary["sweep"]["points"][0]["delivered_rate"] = 9.0
    write_json(home.summary, summary)
    assert "sweep.points[0].delivered_rate is 9.0, derived " in failed(check_all(home.path))["summary.json"]


def test_a_comparison_is_made_again_from_the_runs_that_it_names(run_copy: Copy, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(run_copy(), tmp_path / name)
    made = compare_folders([[tmp_path / "a"], [tmp_path / "b"]], force=True, runs=tmp_path, command="gapmeter compare")
    assert failed(check_all(made.folder)) == {}
    document = json.loads((made.folder / "compare.json").read_text())
    document["sides"][1]["requests"] += 1
    (made.folder / "compare.json").write_text(json.dumps(document))
    assert "sides[1].requests is 31, derived 30" in failed(check_all(made.folder))["compare.json"]
    forge_summary(tmp_path / "b")
    assert "summary.json" in failed(check_all(made.folder))["b"]
    shutil.rmtree(tmp_path / "a")
    assert "cannot be derived again without it" in failed(check_all(made.folder))["a"]
    (made.folder / "compare.json").write_text("{}")
    assert "does not say where its runs are" in failed(check_all(made.folder))["compare.json"]


def test_a_full_disk_here_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is full, where figures are derived again; free some space, or set TMPDIR"):
        not_derived("figures", "records", OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert not not_derived("figures", "records", OSError(errno.EIO, "Input/output error"), tmp_path).ok


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run's folder, and holds none") as error:
        verify(tmp_path)
    assert error.value.exit_code == errors.USAGE
    with pytest.raises(UserError, match="does not exist"):
        verify(tmp_path / "no.tar.gz")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="neither a folder nor an archive"):
        verify(tmp_path / "a.txt")


def test_an_archive_is_verified_as_it_is(run_copy: Copy, tmp_path: Path) -> None:
    packed = archive(run_copy(), tmp_path / "handed-over.tar.gz")
    assert failed(verify(packed)) == {}
    with pytest.raises(UserError, match="exists; write another with -o"):
        archive(run_copy(), packed)


def test_while_a_run_is_being_packed_a_second_archive_of_it_takes_nothing_from_the_first(
    run_copy: Copy, tmp_path: Path
) -> None:
    folder, part = run_copy(), tmp_path / ".a.tar.gz.part"
    part.write_bytes(b"the first one's")
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as the first one does
    with pytest.raises(UserError, match="another gapmeter is at work"):
        archive(folder, tmp_path / "a.tar.gz")
    os.close(held)
    assert part.read_bytes() == b"the first one's"


def test_an_unpacked_archive_is_packed_and_verified_again(run_copy: Copy, tmp_path: Path) -> None:
    packed = archive(run_copy(), tmp_path / "a.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert failed(verify(archive(folder, tmp_path / "b.tar.gz"))) == {}
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "hashes.json").write_text("{}")  # of that name elsewhere is a file like any other
    assert failed(verify(archive(folder, tmp_path / "c.tar.gz"))) == {}


@pytest.mark.parametrize("name", ["summary.json", "verdict.json"])
def test_lists_in_lists_without_end_are_no_summary(name: str, run_copy: Copy) -> None:
    folder = run_copy()
    (folder / name).write_text("[" * 100_000)
    assert failed(verify(folder))[name].startswith("cannot be read: it is nested too deeply")


def test_a_changed_file_inside_an_archive_is_found(
    run_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = archive(run_copy(), tmp_path / "a.tar.gz")
    again = tmp_path / "b.tar.gz"
    with tarfile.open(packed) as one, tarfile.open(again, "w:gz") as other:
        for entry in one:
            file = one.extractfile(entry)
            data = b"{}" if entry.name.endswith("verdict.json") else file.read()
            entry.size = len(data)
            other.addfile(entry, io.BytesIO(data))
    assert main(["verify", str(again)]) == errors.NOT_VALID
    assert "verdict.json was changed" in capsys.readouterr().out


def test_no_key_goes_into_an_archive(run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_copy()
    monkeypatch.setenv("GAPMETER_API_KEY", "environment-secret")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["scenario"]["server"]["args"]["api_key"] = KEY
    manifest["command"] = f"gapmeter run smoke --set 'server.args.api_key={KEY}' --url http://me:pass-word@host/"
    manifest["target"]["url"] = "http://me:pass-word@host/"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "logs" / "server.log").write_text(f"started with {KEY} and environment-secret\n")
    main(["report", str(run), "--quiet"])
    assert b"angled" in (run / "report.html").read_bytes()
    packed = archive(run, tmp_path / "a.tar.gz")
    with tarfile.open(packed) as tar:
        files = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
    everything = b"".join(gzip.decompress(data) if name.endswith(".gz") else data for name, data in files.items())
    for secret in (b"angled", b"environment-secret", b"pass-word"):
        assert secret not in everything
    assert b"started with REDACTED and REDACTED" in everything
    assert failed(verify(packed)) == {}


def test_a_run_whose_records_hold_a_key_is_not_archived(
    run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_copy()
    monkeypatch.setenv("GAPMETER_API_KEY", "environment-secret")
    (run / "requests" / "note").write_text("environment-secret")
    with pytest.raises(UserError, match="holds a key"):
        archive(run, tmp_path / "a.tar.gz")
    assert list(tmp_path.glob("*.gz*")) == []


BLOCK = 1 << 22  # what of a file is looked through at once


@given(
    st.text("ab", max_size=60).map(str.encode),
    st.lists(st.text("ab", min_size=1, max_size=9).map(str.encode), max_size=3),
    st.integers(1, 12),
)
def test_a_word_is_found_wherever_it_stands_across_whatever_is_read_at_once(
    text: bytes, words: list[bytes], block: int
) -> None:
    assert holds_any(io.BytesIO(text), words, block) == any(word in text for word in words)


def test_a_key_that_is_no_text_keeps_no_run_from_being_archived(
    run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, run = b"\xff" * 8, run_copy()
    monkeypatch.setenv("HF_TOKEN", os.fsdecode(key))
    (run / "logs" / "server.log").write_bytes(b"begun with " + key)
    with tarfile.open(archive(run, tmp_path / "a.tar.gz")) as tar:
        assert tar.extractfile(f"{run.name}/logs/server.log").read() == b"begun with REDACTED"


@pytest.mark.parametrize("name", ["logs/server.log", "trace.json.gz", "requests/note", "probe/core-1-1.gap.zst"])
@pytest.mark.parametrize("place", [0, BLOCK - len(LONG) // 2, BLOCK - 1, 2 * BLOCK - 1])
def test_no_key_goes_into_an_archive_across_the_edge_of_what_is_read_at_once(
    name: str, place: int, run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPMETER_API_KEY", LONG)
    run = run_copy()
    whole = b"." * place + LONG.encode() + b"." * BLOCK
    path = run / name.removesuffix(".zst")
    path.write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)
    if name.endswith(".zst"):
        compress(path)
    if name.startswith(("logs", "trace")):
        with tarfile.open(archive(run, tmp_path / "a.tar.gz")) as tar:
            packed = tar.extractfile(f"{run.name}/{name}").read()
        packed = gzip.decompress(packed) if name.endswith(".gz") else packed
        assert packed == whole.replace(LONG.encode(), b"REDACTED")
    else:
        with pytest.raises(UserError, match="holds a key, and a raw record cannot be changed"):
            archive(run, tmp_path / "a.tar.gz")


def test_a_key_in_a_table_of_many_rows_is_found(
    run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPMETER_API_KEY", LONG)
    run = run_copy()
    noted = {"command": f"gapmeter run --api-key {LONG}"}
    pq.write_table(pa.table({"n": list(range(200_000))}).replace_schema_metadata(noted), run / "gaps.parquet")
    with tarfile.open(archive(run, tmp_path / "a.tar.gz")) as tar:
        there = pq.read_table(io.BytesIO(tar.extractfile(f"{run.name}/gaps.parquet").read()))
    assert there["n"].to_pylist() == list(range(200_000))
    assert there.schema.metadata == {b"command": b"gapmeter run --api-key REDACTED"}
    pq.write_table(pa.table({"text": [*map(str, range(200_000)), f"a{LONG}b"]}), run / "gaps.parquet")
    with pytest.raises(UserError, match="holds a key among its values"):
        archive(run, tmp_path / "b.tar.gz")


def test_an_archive_of_an_archive_s_folder_takes_redacted_for_no_key(run_copy: Copy, tmp_path: Path) -> None:
    run = run_copy()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["scenario"]["server"]["args"]["api_key"] = "REDACTED"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "requests" / "note").write_text("REDACTED")
    assert archive(run, tmp_path / "a.tar.gz").exists()


def test_a_file_is_packed_without_being_held_in_memory(run_copy: Copy, tmp_path: Path) -> None:
    run, size = run_copy(), 80 << 20  # more than reading a manifest takes
    for name in ("logs/server.log", "probe/core-1-1.gap"):
        with (run / name).open("wb") as file:
            file.truncate(size)
    compress(run / "probe" / "core-1-1.gap")
    tracemalloc.start()
    try:
        archive(run, tmp_path / "a.tar.gz")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < size


@pytest.mark.parametrize(("end", "why"), [(None, "unpacks to more than records can be"), (99, "cannot be unpacked")])
def test_what_cannot_be_looked_through_for_keys_is_not_archived(
    end: int | None, why: str, run_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_copy()
    monkeypatch.setattr("gapmeter.records.compression._LITTLE", 1 << 20)
    (run / "requests" / "bomb").write_bytes(gzip.compress(bytes(1 << 23))[:end])
    with pytest.raises(UserError, match=why):
        archive(run, tmp_path / "a.tar.gz")


@pytest.mark.parametrize("target", [None, "logs/a.tar.gz", "../NAME/a.tar.gz"])
def test_an_archive_is_not_written_into_the_folder_that_it_holds(
    target: str | None, run_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_copy()
    before = sorted(run.rglob("*"))
    monkeypatch.chdir(run)
    with pytest.raises(UserError, match=f"would lie in the folder that it is to hold; .* -o {run.parent}/"):
        archive(".", target and target.replace("NAME", run.name))
    assert sorted(run.rglob("*")) == before
    assert failed(verify(archive(".", f"../{run.name}.tar.gz"))) == {}


def tar_with(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


HOSTILE = [
    member("../out"), member("/etc/out"), member("run/../../out"), member("run/link", tarfile.SYMTYPE, "/etc/passwd"),
    member("run/hard", tarfile.LNKTYPE, "run/a"), member("run/pipe", tarfile.FIFOTYPE),
    member("run/dev", tarfile.CHRTYPE),
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda info: info.name)
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    packed = tar_with(tmp_path / "a.tar.gz", member("run/a"), hostile)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        verify(packed)
    assert error.value.exit_code == errors.NOT_VALID
    assert set(tmp_path.rglob("*")) == before


def test_an_archive_with_a_time_that_no_file_can_have_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.tar.gz"
    entry = tarfile.TarInfo("run/manifest.json")
    entry.mtime = 1e300
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(entry)
    with pytest.raises(UserError, match="cannot be unpacked"):
        verify(path)


def test_an_archive_of_folders_in_folders_without_end_is_refused(tmp_path: Path) -> None:
    packed = tar_with(tmp_path / "a.tar.gz", member("run/a"), member(f"run/{'d/' * 1500}x"))
    with pytest.raises(UserError, match="more than a run's folder can be"):
        verify(packed)


@pytest.mark.parametrize("size", [1 << 50, (1 << 30) + 1])  # the second is more than so few bytes unpack to in a run
def test_an_archive_that_is_too_large_is_refused_before_it_is_read_through(tmp_path: Path, size: int) -> None:
    huge = tarfile.TarInfo("run/a")
    huge.size = size
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(huge.tobuf()))  # none of what it says is there
    with pytest.raises(UserError, match="more than a run's folder can be"):
        verify(tmp_path / "a.tar.gz")


def test_what_is_packed_but_no_archive_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"hello" * 1000))
    with pytest.raises(UserError, match=r"a\.tar\.gz cannot be unpacked: [^\n]+$"):
        verify(tmp_path / "a.tar.gz")


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    whole = tar_with(tmp_path / "b.tar.gz", member("run/a")).read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot be unpacked|neither a folder nor an archive"):
        verify(tmp_path / "c.tar.gz")


def test_an_archive_of_somebody_else_s_making_says_so(run_copy: Copy, tmp_path: Path) -> None:
    run = run_copy()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(run, run.name)
    assert failed(verify(tmp_path / "a.tar.gz"))
    assert not (run / HASHES).exists()


def test_no_sentence_about_an_archive_names_the_folder_that_it_was_unpacked_into(
    run_copy: Copy, tmp_path: Path
) -> None:
    run = run_copy()
    (records,) = run.glob("requests/*.gap.zst")
    records.write_bytes(records.read_bytes()[:-100])
    said = failed(verify(run))["figures"]
    assert said.startswith("cannot be derived from these records: requests/worker-0.gap.zst: it cannot be unpacked")
    path = tar_with(tmp_path / "a.tar.gz", member("run/a"))
    for refuse in (lambda: verify(path), lambda: compare_folders([[path], [run]], runs=tmp_path, command="")):
        with pytest.raises(UserError, match=f"^{path} is not a run's folder"):
            refuse()


def test_figures_that_differ_in_their_last_digits_alone_are_the_same() -> None:
    assert list(differing({"a": [1.0, 0.1 + 0.2]}, {"a": [1.0, 0.3]})) == []
    assert list(differing({"a": {"b": 1.0}}, {"a": {"b": 1.001}})) == ["a.b is 1.0, derived 1.001"]
    assert list(differing({"a": 1, "c": None}, {"a": 1, "b": 2})) == ["c is not of these records", "b is missing"]
    assert list(differing([1, 2], [1])) == [" is [1, 2], derived [1]"]
    assert list(differing({"a": True}, {"a": 1})) == ["a is true, derived 1"]


@pytest.mark.parametrize(
    ("published", "derived", "is_same"),
    [
        ([0.1 + 0.2, -math.inf], [0.3, -math.inf], True),
        ([math.nan, 1.0], [math.nan, 1.0 + 1e-12], True),
        ([1.0], [1.000001], False),
        ([math.nan], [None], False),
        ([math.nan], [0.0], False),
        ([math.inf], [-math.inf], False),
        ([10**15], [10**15 + 1], False),
        ([1], [1.0], False),
        (["1.0"], ["1.00"], False),
        ([[1, 2]], [[1, 3]], False),
        ([None], [None], True),
    ],
)
def test_columns_are_the_same_where_their_fractions_are_to_nine_digits_and_all_else_is_exactly(
    published: list[Any], derived: list[Any], is_same: bool, tmp_path: Path
) -> None:
    paths = [tmp_path / "published.parquet", tmp_path / "derived.parquet"]
    for path, values in zip(paths, (published, derived), strict=True):
        table = pa.table({"a": pa.array([*values, None]), "b": pa.array([None, *values])})
        pq.write_table(table.replace_schema_metadata({"path": str(path)}), path)  # no byte for byte the same
    check = compare_file(*paths)
    assert (check.ok, "column a differs; column b differs" in check.seen) == (is_same, not is_same)
