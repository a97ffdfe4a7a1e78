"""Records of every kind the page knows, with made-up figures: what the program's own commands write, in small."""

from pathlib import Path

from lpa import records
from lpa.convert.config import ConvertConfig, read

MODEL, DATA, TEST = "models/wav2vec2-12", "LibriSpeech/dev-clean", "LibriSpeech/test-clean"
NETWORK = {"family": "wav2vec2", "layers": 12, "replaced": 0, "mixers": []}
PAPER_WER = (9.0, 9.4, 9.8, 10.4, 10.9, 11.2, 11.9, 12.6, 14.0, 19.0, 33.0)
ROWS = (52.0, 30.0, 21.0, 18.5, 16.0, 15.2, 14.6, 14.0)


def config(recipe: str, *overrides: str, **given) -> ConvertConfig:
    return read(recipe, overrides, model=MODEL, sources=[DATA], held_out=["84"], **given)


def write(folder: Path) -> Path:
    """All of them into FOLDER."""

    def conversion(kind: str, settings: ConvertConfig, what: str, wer: float, layers: int) -> None:
        figures = {"wer": wer, "layers": layers, "training_seconds": 60.0 * layers + 30}
        about = {"model": MODEL, "data": DATA, "seed": settings.seed, "network": NETWORK, "config": settings.to_dict()}
        records.write(kind, what=what, figures=figures, folder=folder, **about)

    for layers, wer in enumerate(PAPER_WER):
        conversion("convert", config("paper"), f"step {layers}", wer, layers)
        conversion("convert", config("paper", "mixer=summary"), f"step {layers}", 1.4 * wer, layers)
    for seed in range(3):
        best = config("best", f"seed={seed}", "layers=8")
        control = config("best", f"seed={seed}", "keep_attention=true", "order=0,1,2,3,4,5,6,7")
        conversion("convert", best, "step 1", 9.6 + 0.1 * seed, 8)
        conversion("convert", best, "final", 9.5 + 0.1 * seed, 8)
        conversion("control", control, "final", 9.4 + 0.1 * seed, 8)
        evaluation(folder, 8, {"wer": 11.5 + 0.1 * seed, "cer": 4.0}, config=best, mixer="pyramid")
        evaluation(folder, 0, {"wer": 11.4 + 0.1 * seed, "cer": 4.0}, config=control)
    for row, wer in enumerate(ROWS):
        conversion("convert", ablation(row), "final", wer, 8)
        conversion("convert", ablation(row), "step 8", wer, 8)
    conversion("convert", config("paper", "order=depth", "settle_epochs=4"), "final", 77.0, 8)  # another training
    for minutes, wer in ((1, 13.5), (10, 12.5)):
        timed = config("best", f"minutes={minutes}")
        conversion("convert", timed, "final", wer - 1, 12)
        evaluation(folder, 12, {"wer": wer, "cer": 4.0}, config=timed, mixer="pyramid")
    evaluation(folder, 12, {"wer": 15.5, "cer": 5.0}, config=config("none"), mixer="pyramid")
    evaluation(folder, 12, {"wer": 47.0, "cer": 9.0}, config=config("none", "plan=choice.json"), mixer="ladder")
    for layers in (1, 2, 3):
        about = {"config": config("paper"), "model": f"runs/paper/step-{layers:02d}/model"}
        evaluation(folder, layers, {"wer": 20.0 + layers, "cer": 5.0}, **about)
    for layer in range(12):
        figures = {"layer": layer, "mse": 0.01 * 1.4**layer, "surviving": 48 + 5 * layer}
        about = {"model": MODEL, "data": DATA, "seed": 0, "network": NETWORK, "config": {"mixer": "lpa"}}
        records.write("sweep", what="layer", figures=figures, folder=folder, **about)
    for replaced in (0, 4, 8):
        evaluation(folder, replaced, {"wer": 10.0 + replaced, "cer": 4.0}, interval=(9.5 + replaced, 10.5 + replaced))
        evaluation(folder, replaced, {"wer": 10.5 + replaced, "cer": 4.2}, data=DATA)
    for seconds in (5, 30, 120, 600):
        evaluation(folder, 8, {"wer": 11 + seconds / 300, "cer": 4.0, "seconds": seconds})
    for ahead in (4.0, 1.0):
        evaluation(folder, 8, {"wer": 15 - ahead, "cer": 4.0}, latency=ahead)
    for tau in ("0.5", "0.01", "hard"):
        evaluation(folder, 8, {"wer": 11.0, "cer": 4.0}, tau=tau)
    for mixer, start in (("lpa", 6.0), ("summary", 6.5)):
        for layers in (0, 2, 4, 8):
            network = {"family": "sepformer", "layers": 16, "replaced": layers, "mixers": [mixer] if layers else []}
            about = {"model": f"runs/{mixer}/{layers}", "data": "LibriSpeech/test-clean", "noise": "gaussian"}
            figures = {"si_snri": start + layers / 10 if layers else 5.9}
            records.write("evaluate", what="si_snri", figures=figures, network=network, folder=folder, **about)
    for noise in ("white", "babble"):
        network = {"family": "sepformer", "layers": 16, "replaced": 16, "mixers": ["pyramid", "window"]}
        about = {"model": "runs/all/model", "data": TEST, "noise": noise, "network": network}
        figures = {"si_snri": 7.0, "pesq": 2.1, "pesq_noisy": 1.2, "stoi": 0.92, "stoi_noisy": 0.85}
        records.write("evaluate", what="si_snri", figures=figures, folder=folder, **about)
    chosen = {**config("none", "plan=runs/plan/choice.json").to_dict()}
    told = {"predicted": {"wer_points": 1.9, "mflop_per_second": 700.0}, "outcome": {"wer_points": 2.6}}
    about = {"model": MODEL, "data": DATA, "config": chosen, "network": {**NETWORK, "mixers": ["ladder", "pyramid"]}}
    records.write("convert", what="final", figures={"wer": 11.0, "layers": 12}, folder=folder, **about, **told)
    for model in ("attention", "lpa, 12 pulses", "lpa, 36 pulses"):
        for part in ("linear projections", "whole layer"):
            figures = {"us": 1000.0 + len(model), "measured_us": 1200.0}
            about = {"what": "roofline, 6000 frames, width 768", "model": model, "part": part}
            records.write("bench", figures=figures, folder=folder, **about)
    for seconds in (10, 60, 600):
        for name, share in (("attention", 1.0), ("lpa", 30 / (30 + seconds))):
            figures = {
                "seconds": seconds,
                "median_ms": 20.0 * seconds * share,
                "speedup": 1 / share,
                "peak_mb": 200.0 + seconds,
            }
            records.write(
                "bench",
                what="model, wav2vec2-base, torch, fp32, wall clock",
                model=name,
                data="random",
                figures=figures,
                folder=folder,
            )
    for name, wer in (("lpa default", 6.0), ("pocketsphinx", 39.0)):
        factors = {"real_time_factor": 0.05, "low_factor": 0.04, "high_factor": 0.06, "peak_mb": 300.0}
        figures = {"wer": wer, "wer_low": wer - 1, "wer_high": wer + 1, **factors}
        records.write("bench", what="peers", model=name, data="LibriSpeech/test-clean", figures=figures, folder=folder)
    for seconds, took in ((10, 0.9), (3600, 80.0)):
        figures = {"seconds": seconds, "wall_s": took, "ms_per_second": 1e3 * took / seconds, "peak_mb": 700.0}
        about = {"what": "transcribe, onnx", "model": "default", "data": "talk.flac"}
        records.write("bench", figures=figures, folder=folder, **about)
    for name, gain in (("attention", 1.0), ("lpa", 3.2), ("pyramid", 1.1)):
        figures = {"frames": 500, "median_ms": 18 / gain, "low_ms": 17 / gain, "high_ms": 19 / gain, "speedup": gain}
        about = {"what": "layer, width 768, float32, cpu", "model": name, "data": "random", "seed": 0}
        records.write("bench", figures={**figures, "mflop_per_frame": 6.25}, folder=folder, **about)
    return folder


def ablation(row: int) -> ConvertConfig:
    """The conversion of a row of the cumulative ablation, as `lpa ablate` sets it up."""
    from lpa.convert.ablate import rows

    return rows(config("paper", "settle_epochs=1", layers=8))[row][1]


def evaluation(
    folder: Path,
    replaced: int,
    figures: dict,
    *,
    interval=None,
    data=TEST,
    tau=None,
    latency=None,
    config=None,
    mixer="lpa",
    model=None,
):
    """Of a step's model, or with its config of a run's last one."""
    network = {**NETWORK, "replaced": replaced, "mixers": [mixer] if replaced else []}
    model = model or (f"runs/best-{config.seed}/model" if config else f"runs/paper/step-{replaced:02d}/model")
    about = {"data": data, "network": network, "tau": tau, "latency": latency, "seed": config and config.seed}
    settings = config and config.to_dict()
    written = {"figures": figures, "interval": interval, "model": model, "config": settings, "folder": folder}
    records.write("evaluate", what="wer", **written, **about)
