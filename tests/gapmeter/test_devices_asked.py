"""What a scenario asks of devices is checked before anything runs: their names, and the precisions that they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapmeter import errors
from gapmeter.cli import main
from gapmeter.errors import UserError
from gapmeter.study.resolve import resolve
from gapmeter.study.target import check_precision, cpu_flags, own_support

SCENARIO = """\
name: mine
server: {engine: simulated}
cost:
  usd_per_hour: 2.49
  gpu: H10O
workload: {prompt_tokens: 8, output_tokens: 4}
load: {rate: 5, requests: 20}
"""


def test_an_unknown_gpu_is_told_with_its_place_and_the_nearest_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO)
    assert main(["run", str(path)]) == errors.BAD_SCENARIO
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f'gapmeter: {path}:5:8 cost.gpu: "H10O" is not in the catalogue; did you mean H100-SXM')
    assert said[1] == "exit=104 bad scenario"


def test_a_flag_with_an_unknown_gpu_or_a_negative_price_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smoke", "--set", "cost.gpu=abacus"]) == errors.BAD_SCENARIO
    assert '--set cost.gpu: "abacus" is not in the catalogue; known are H100-SXM' in capsys.readouterr().err
    assert main(["run", "smoke", "--set", "cost.usd_per_hour=-2"]) == errors.BAD_SCENARIO
    assert "--set cost.usd_per_hour: -2 is not a price; write 2.49 (USD per hour)" in capsys.readouterr().err


def test_a_known_gpu_by_any_of_its_names_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO.replace("H10O", "nvidia h100"))
    assert resolve(str(path), []).cost.gpu == "nvidia h100"


def test_a_price_does_not_change_what_is_measured() -> None:
    plain, priced = (resolve("smoke", flags) for flags in ([], ["cost.usd_per_hour=9", "cost.gpu=L4"]))
    assert plain.digest() == priced.digest()


@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "float16", "bfloat16", "float32"])
def test_a_precision_that_this_machine_only_emulates_is_refused_or_marked(precision: str) -> None:
    asked = ["server.engine=transformers", f"server.precision={precision}"]
    emulated = own_support(precision).emulated
    if emulated:
        with pytest.raises(UserError, match=rf"server.precision: .* has no native {precision}") as error:
            check_precision(resolve("smoke", asked))
        assert error.value.exit_code == errors.BAD_SCENARIO
    told = check_precision(resolve("smoke", [*asked, "server.emulation=mark"]))
    assert told.emulated is emulated
    assert emulated == (told.native is False)


def test_the_simulated_engine_has_no_precision_to_check() -> None:
    assert check_precision(resolve("smoke", ["server.engine=simulated", "server.precision=nvfp4"])) is None


def test_the_processor_s_flags_are_those_that_the_kernel_lists() -> None:
    listed = Path("/proc/cpuinfo").read_text()
    assert all(f" {flag}" in listed for flag in cpu_flags())
    assert ("avx512_bf16" in cpu_flags()) == (" avx512_bf16" in listed)
