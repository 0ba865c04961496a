"""As it is installed: the wheels claim two names and no more, and a user's files of any name stand in nobody's way."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kit.command import ROOT, SHORT

SHADOWS = (
    "servers", "analysis", "types", "json", "records", "loadgen", "scenarios", "report", "locust", "gapmeter_probe",
)  # fmt: skip


@pytest.mark.whole_run
def test_a_folder_with_modules_of_every_name_is_a_place_to_run_in(tmp_path: Path) -> None:
    """As a console script does it, whose path begins with its own folder, and not with where the user stands."""
    script = tmp_path / "bin" / "gapmeter"
    script.parent.mkdir()
    script.write_text("import sys\nfrom gapmeter.__main__ import program\nsys.exit(program())\n")
    here = tmp_path / "project"
    here.mkdir()
    for name in SHADOWS:
        (here / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    words = ["run", "smoke", "--engine", "simulated", *SHORT]
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=here, capture_output=True, text=True, timeout=300, check=False
    )
    assert "was imported" not in done.stderr
    assert done.returncode in (0, 98, 99), done.stderr
    (run,) = (here / "runs").iterdir()
    assert done.stdout.strip() == f"runs/{run.name}"
    assert (run / "report.html").exists()


@pytest.mark.environment
@pytest.mark.parametrize(("project", "name"), [(ROOT, "gapmeter"), (ROOT / "probe", "gapmeter_probe")])
def test_a_wheel_claims_one_name(project: Path, name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves its products where it is made
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "tests", "docs", "__pycache__")
    shutil.copytree(project, source, symlinks=True, ignore=left_out)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as pack:
        names = pack.namelist()
    tops = {entry.split("/")[0] for entry in names if not entry.split("/")[0].endswith(".dist-info")}
    assert tops == {name}
    if name == "gapmeter":
        for part in (
            "scenarios/smoke.yaml", "analysis/gpus.yaml", "servers/words.txt", "loadgen/worker.py",
            "web/assets/live.js", "report/assets/page.html",
        ):  # fmt: skip
            assert f"gapmeter/{part}" in names
