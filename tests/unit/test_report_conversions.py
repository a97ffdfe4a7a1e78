"""What conversions come to: none is left out, and none stands beside what trained for longer."""

import pytest
import report_records

from lpa import records
from lpa.report import measured, ours, readme

SIX = "order=0,1,2,3,4,5"


@pytest.fixture
def found(tmp_path) -> list[dict]:
    """A pyramid and windows, each trained for two lengths, with a control of both lengths; conv for one, with none."""

    def trained(mixer: str, steps: int, wer: float, *settings: str) -> None:
        changes = (f"mixer={mixer}", "mixer_config={}", "layers=6", f"settle_epochs={steps / 1000}", *settings)
        config = report_records.config("best", *changes)
        figures = {"wer": wer + 1, "layers": 6, "training_steps": steps}
        about = {"model": report_records.MODEL, "data": report_records.DATA, "seed": 0, "config": config.to_dict()}
        kind = "control" if config.keep_attention else "convert"
        records.write(kind, what="final", figures=figures, network=report_records.NETWORK, folder=tmp_path, **about)
        report_records.evaluation(tmp_path, 6, {"wer": wer, "cer": 4.0}, config=config, mixer=mixer)

    for steps, gain in ((1000, 0.0), (5000, 3.0)):
        trained("pyramid", steps, 30.0 - gain)
        trained("pyramid", steps, 29.0 - gain, "keep_attention=true", SIX)
        trained("window", steps, 31.0 - gain)
    trained("conv", 1001, 40.0, "lr=0.5")
    return measured.load(tmp_path)


def test_a_conversion_without_a_control_has_an_empty_one(found):
    rows = {(row[1].split()[0].strip(","), row[3].split()[0]): row for row in ours.converted(found).grid.rows}
    assert len(rows) == 5
    assert [rows["conv", "1,001"][n] for n in (5, 6, 8, 9)] == [None] * 4
    assert rows["conv", "1,001"][4].value == 40.0
    assert (rows["window", "5,000"][5].value, rows["window", "5,000"][6]) == (26.0, "+2.00")


def test_what_was_measured_on_a_part_of_the_held_out_speech_stands_beside_nothing(found):
    few = [{**r, "config": {**r["config"], "train": {**r["config"]["train"], "held_out_limit": 96}}} for r in found]
    assert all(row[7] is not None for row in ours.converted(found).grid.rows)
    rows = ours.converted(few).grid.rows
    assert len(rows) == 5
    assert all(row[4] is not None and row[7:] == [None] * 3 for row in rows)


def test_what_trained_for_as_long_stands_together(found):
    rows = ours.converted(found).grid.rows
    lengths = [row[3] for row in rows]
    assert len(rows) == 5
    assert [length.split()[0] for length in lengths[-2:]] == ["5,000", "5,000"]
    assert all(length.endswith(" steps of 100 s") for length in lengths)


def test_the_readme_has_every_mixer_at_every_length_of_training(found):
    table = [line.split(" | ") for line in readme.BLOCKS["conversions"](found).splitlines() if "12 | " in line]
    assert [(cells[1].split(" ")[0].rstrip(","), cells[3].split()[0], cells[4].split()[0]) for cells in table] == [
        ("pyramid", "1,000", "30.00"),
        ("window", "1,000", "31.00"),
        ("pyramid", "5,000", "27.00"),
        ("window", "5,000", "28.00"),
    ]
    assert [cells[5].strip(" |") for cells in table] == ["29.00", "29.00", "26.00", "26.00"]  # conv has none


def test_the_readme_has_what_was_not_trained_the_best_first(found, tmp_path):
    report_records.evaluation(tmp_path, 0, {"wer": 25.0, "cer": 4.0})
    for side, wer in ((16, 50.0), (64, 27.0)):
        config = report_records.config("none", "mixer=window", f"mixer_config.side={side}")
        report_records.evaluation(tmp_path, 12, {"wer": wer, "cer": 4.0}, config=config, mixer="window")
    table = readme.BLOCKS["untrained"](measured.load(tmp_path)).splitlines()
    assert [line.split(" | ")[1] for line in table if "12 of 12" in line] == ["window ±64", "window ±16"]


def test_curves_say_how_long_each_was_trained(found, tmp_path):
    for record in [r for r in found if r["kind"] == "evaluate" and not r["config"]["keep_attention"]]:
        for seconds in (5, 60):
            figures = {"wer": 30.0, "cer": 4.0, "seconds": seconds}
            about = {"config": record["config"], "model": "runs/x/model", "network": record["network"]}
            records.write("evaluate", what="wer", figures=figures, data=report_records.TEST, folder=tmp_path, **about)
    ((base, lines),) = ours.durations(measured.load(tmp_path)).items()
    named = [line.name for line in lines]
    assert base == "wav2vec2-12"
    assert len(named) == len(set(named)) == 5
    assert "conv, distilled, 1,001 steps of 100 s" in named
    assert sum(name.endswith(", 5,000 steps of 100 s") for name in named) == 2


def test_a_mixers_settings_stand_apart_with_the_range_over_the_layers(tmp_path):
    def swept(mixer: str, settings: dict, shares: list[float], epochs: float = 0.0) -> None:
        config = {"mixer": mixer, "mixer_config": settings, "train": {"epoch_seconds": 100.0, "held_out_limit": 24}}
        for layer, share in enumerate(shares):
            figures = {"layer": layer, "epochs": epochs, "relative": share, "kl": share / 10, "mflop_per_second": 60.0}
            about = {"model": report_records.MODEL, "data": report_records.DATA, "seed": 0, "config": config}
            records.write("sweep", what=f"layer {layer}", figures=figures, folder=tmp_path, **about)

    swept("pyramid", {"block": 4, "pieces": [2, 2], "steps": [1]}, [0.1, 0.3])
    swept("pyramid", {"block": 8, "pieces": [2, 2, 4], "steps": [1]}, [0.1, 0.1])
    swept("ladder", {}, [0.5, 0.5], epochs=2.0)
    swept("ladder", {"ladder": 32}, [0.5, 0.5], epochs=2.0)  # the mixer's own name, and no table of it
    rows = {(row[1], row[2]): row for row in ours.tried(measured.load(tmp_path)).grid.rows}
    assert set(rows) == {
        ("pyramid of 10 windows, 8 frames", "none"),
        ("pyramid of 16 windows, 16 frames", "none"),
        ("ladder", "200 s"),
        ("ladder ladder=32", "200 s"),
    }
    left, kl, cost = rows["pyramid of 10 windows, 8 frames", "none"][4:]
    assert (left.value, left.low, left.high, len(left.ids)) == (pytest.approx(20), pytest.approx(10), 30, 2)
    assert (kl.value, cost.value, cost.low) == (pytest.approx(0.02), 60, None)
