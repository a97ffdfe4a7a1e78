"""The tables of conversions, controls and rivals: many runs side by side, each an `lpa` command.

    python recipes/convert_table.py train --data LibriSpeech [--synthetic DIR] [--only PATTERN] [--lanes 8] [--measure]
    python recipes/convert_table.py measure --data LibriSpeech [--only PATTERN]      what is finished, on test-clean
    python recipes/convert_table.py list --data LibriSpeech                          the commands, and nothing more

On two CPU cores that multiply in bf16, small enough for two hours:

    OMP_NUM_THREADS=1 python recipes/convert_table.py train --data LibriSpeech --lanes 2 --minutes 120 --device cpu \
        --scale 0.18 --epochs 0.57 --lr 1e-4 --set batch_seconds=24 --set train.precision=bf16 --set front_gb=0 \
        --set train.held_out_limit=96

Run the same line again and it goes on: what is done is not done twice. What is trained hears dev-clean less four
speakers, who judge it. A lane is a process that starts once and runs one command after the other; a step of these
small models leaves most of a large GPU idle, so many lanes share it (with CUDA's MPS daemon running; without, try
--lanes 3). Outside a git clone set LPA_COMMIT, or nothing is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import re
import shlex
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from lpa.convert.config import FINE

HELD_OUT = "1272,2035,5338,6241"
SEEDS = (0, 1, 2)
# the paper's epochs, scaled: its 8 of a stage are of 100 to 360 h
SCALED = {"warm_epochs": 0.08, "settle_epochs": 0.24, "align_epochs": 0.16, "final_epochs": 0.32}
EPOCH = 16_900  # seconds of the speakers who are not held out
ROWS = 8  # of the ablation
WIDTHS = (32, 64, 128)  # of windows, frames on either side
MIXERS = ("ladder", "anchored", "conv", "summary")
TUNED: dict[str, tuple[dict[str, object], ...]] = {  # of the mixers of pulses: what is changed, one thing at a time
    "ladder": (
        {},
        {"reach": 32},
        {"reach": 128},
        {"ladder": 8},
        {"ladder": 32},
        {"heads": 4},
        {"output_gate": "false"},
    ),
    "anchored": ({}, {"reach": 32}, {"reach": 128}, {"anchored": 24}, {"heads": 8}, {"output_gate": "false"}),
}
HARDENED = 0.02  # temperature at which gates are as good as hard
JOINS = ("--join", "5", "--join", "20", "--join", "60", "--join", "180", "--join", "600")
TAUS = ("--tau", "0.5", "--tau", "0.1", "--tau", "0.01", "--tau", "hard")


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]  # of `lpa`
    makes: Path  # there once it is done
    after: Path | None = None  # what it needs


def settings(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def inline(table: dict[str, object]) -> str:
    """A TOML table in one line, as --set takes it."""
    return "{" + ",".join(f"{key}={value}" for key, value in table.items()) + "}"


class Table:
    """What is run, in the order of importance."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.jobs, self.runs = options, list[Job](), options.runs
        self.whisper, self.wave = (str(options.models / name) for name in ("whisper-base-ctc", "wav2vec2-12"))
        speech = ["--data", str(options.data / "dev-clean"), "--held-out", HELD_OUT]
        kept = {"train.cache": options.cache, "front_gb": 8.0, "train.pad_seconds": 1.0}
        self.given = [part for text in options.set for part in ("--set", text)]
        self.plain = [*speech, *settings(**kept)]
        mixed = ["--data", str(options.synthetic), *settings(shares="[0.25,0.75]")] if options.synthetic else []
        self.shipped = ["--recipe", "best", *self.plain]
        self.best = [*self.shipped, *mixed]
        scaled = {name: epochs * options.scale for name, epochs in SCALED.items()}
        self.paper = ["--recipe", "paper", *self.plain, *settings(**scaled, batch_seconds=64), "--layers", "8"]
        self.swept = settings(**{"train.epoch_seconds": EPOCH * options.scale})

    def add(self, verb: str, name: str, *arguments: str, after: Path | None = None, makes: str = "result.json") -> None:
        out = self.runs / name.split()[0]  # rows of one table share its folder
        record = ["--record", "--results", str(self.options.results)]
        given = self.given if verb != "control" else []  # it has what its conversion had
        self.jobs.append(Job(name, (verb, *arguments, *given, "--out", str(out), *record), out / makes, after))

    def convert(self, name: str, *arguments: str, after: Path | None = None) -> None:
        self.add("convert", name, *arguments, after=after)

    def control(self, name: str) -> None:
        self.add("control", f"{name}-control", str(self.runs / name), after=self.runs / name / "order.json")

    def all_jobs(self) -> list[Job]:
        self.sweeps()
        self.every_depth()
        self.headlines()
        self.of_the_paper()
        self.rivals()
        self.rates()
        self.enhancement()
        self.little_training()
        self.planner()
        self.tuning()
        return self.jobs

    def sweeps(self) -> None:
        for mixer, more in (("lpa", {}), ("pyramid", {"mixer_config.pyramid": inline(FINE)})):
            named = [*self.swept, "--mixer", mixer, *settings(**more)]
            self.add("sweep", f"sweep-{mixer}", self.wave, *self.plain, *named, makes="sweep.json")

    def every_depth(self) -> None:
        """The paper's recipe to the last layer: the longest run, so it begins first."""
        sweep = self.runs / "sweep-lpa"
        all_layers = [*self.paper, "--layers", "12", *settings(sweep=sweep)]
        self.convert("paper-all", self.wave, *all_layers, after=sweep / "sweep.json")

    def headlines(self) -> None:
        wave, whisper = self.wave_training(), self.whisper_training()
        order = self.runs / "sweep-pyramid"
        for seed in SEEDS:
            seeded = settings(seed=seed)
            self.convert(f"all-{seed}", self.wave, *wave, *seeded)
            eight = ["--layers", "8", *settings(sweep=order)]
            self.convert(f"eight-{seed}", self.wave, *wave, *eight, *seeded, after=order / "sweep.json")
            self.convert(f"default-{seed}", self.whisper, *whisper, *seeded)
        for seed in SEEDS:
            for name in ("all", "eight", "default"):
                self.control(f"{name}-{seed}")

    def wave_training(self) -> list[str]:
        return [*self.best, *settings(settle_epochs=self.options.epochs, lr=self.options.lr)]

    def whisper_training(self) -> list[str]:
        return [*self.wave_training(), *settings(positions="false")]

    def rivals(self) -> None:
        """As many keys as the pyramid has windows, more of them, and mixers without keys."""
        widths = {f"window{side}": ["--mixer", "window", *settings(**{"mixer_config.side": side})] for side in WIDTHS}
        others = {mixer: ["--mixer", mixer] for mixer in MIXERS}
        for name, mixer in {**widths, **others}.items():
            self.convert(f"all-{name}", self.wave, *self.wave_training(), *mixer)
            self.convert(f"default-{name}", self.whisper, *self.whisper_training(), *mixer)
        self.convert("default-positions", self.whisper, *self.wave_training())  # what the positions cost

    def rates(self) -> None:
        """The recipe as it comes, on dev-clean alone; more gently for longer; and at twice the rate."""
        changed = {
            "plain": self.shipped,
            "gentle": [*self.best, *settings(settle_epochs=2 * self.options.epochs, lr=self.options.lr / 4)],
            "fast": [*self.best, *settings(settle_epochs=self.options.epochs, lr=2 * self.options.lr)],
        }
        for name, how in changed.items():
            for seed in SEEDS:
                seeded = settings(seed=seed)
                self.convert(f"all-{name}-{seed}", self.wave, *how, *seeded)
                self.convert(f"default-{name}-{seed}", self.whisper, *how, *settings(positions="false"), *seeded)
                for model in ("all", "default"):
                    self.control(f"{model}-{name}-{seed}")

    def of_the_paper(self) -> None:
        """The ablation, of which two rows differ in nothing but the order; a third order, and SummaryMixing."""
        sweep = self.runs / "sweep-lpa"
        swept = [self.wave, *self.paper, *settings(sweep=sweep)]
        for row in reversed(range(ROWS)):
            makes = f"row-{row}/result.json"
            self.add("ablate", f"ablate row-{row}", *swept, "--row", str(row), after=sweep / "sweep.json", makes=makes)
        self.convert("paper-random", self.wave, *self.paper, "--order", "random:0")
        self.convert("paper-hard", *swept, *settings(final_tau=HARDENED), after=sweep / "sweep.json")
        self.convert("paper-summary", *swept, "--mixer", "summary", after=sweep / "sweep.json")
        for name in ("paper-all", "ablate/row-7", "ablate/row-6", "paper-random"):
            self.control(name)

    def enhancement(self) -> None:
        """The attention across the chunks of a SepFormer that has none left within them."""
        recipe = str(Path(__file__).with_name("sepformer-inter.toml"))
        kept = settings(**{"train.cache": self.options.cache})
        arguments = ["--data", str(self.options.data / "dev-clean"), "--recipe", recipe, *kept]
        self.convert("enhance-inter", str(self.options.enhance), *arguments)
        self.control("enhance-inter")

    def little_training(self) -> None:
        """None at all, beside windows of no fewer keys; and by the clock."""
        for name, model in (("all", self.wave), ("default", self.whisper)):
            free = [model, *self.plain, "--recipe", "none"]
            self.convert(f"{name}-free", *free)
            self.convert(f"{name}-free-window128", *free, "--mixer", "window", *settings(**{"mixer_config.side": 128}))
        for minutes in (1, 3):
            more = settings(minutes=minutes)
            self.convert(f"all-minutes-{minutes}", self.wave, *self.wave_training(), *more)
            self.convert(f"default-minutes-{minutes}", self.whisper, *self.whisper_training(), *more)

    def planner(self) -> None:
        """What it predicts, what that comes to as it is, and after training."""
        mixers = [part for name in ("pyramid", "ladder", "window") for part in ("--mixer", name)]
        trained = [*self.swept, *settings(**{"mixer_config.window": "{side=128}"})]  # pyramids are best's
        self.add("plan", "plan", self.wave, *self.plain, *trained, *mixers, "--budget", "2", makes="choice.json")
        choice = self.runs / "plan" / "choice.json"
        taken = ["--plan", str(choice)]
        self.convert("plan-free", self.wave, *self.plain, "--recipe", "none", *taken, after=choice)
        self.convert("plan-best", self.wave, *self.wave_training(), *taken, after=choice)

    def tuning(self) -> None:
        """What each setting of the mixers of pulses does, every layer trained for an epoch beside its attention."""
        for mixer, changes in TUNED.items():
            for change in changes:
                name = "-".join([f"tune-{mixer}", *(f"{key}-{value}" for key, value in change.items())])
                how = settings(epochs=1, provision=0, **{f"mixer_config.{k}": v for k, v in change.items()})
                arguments = [*self.plain, *self.swept, "--mixer", mixer, *how]
                self.add("sweep", name, self.wave, *arguments, makes="sweep.json")


def measurements(options: argparse.Namespace) -> list[Job]:
    """Every model that came out, every depth of the paper's recipe; some on joined speech or with sharper gates."""
    steps = {f"{run}/step-{n:02d}" for run in ("ablate/row-6", "paper-random") for n in range(1, 9)}
    steps |= {f"paper-all/step-{n:02d}" for n in range(1, 13)}
    runs = [path.parents[1] for path in options.runs.glob("*/model/plan.json")]
    runs += [path.parents[1] for path in options.runs.glob("ablate/*/model/plan.json")]
    speech = [run for run in runs if not run.name.startswith("enhance")]
    models = sorted(run / "model" for run in [*speech, *(options.runs / step for step in steps)])
    kinds: list[tuple[str, tuple[str, ...], list[Path]]] = [("whole", (), models)]
    rivals = (*(f"window{side}" for side in WIDTHS), *MIXERS)
    converted = ["eight-0", "all-0", "default-0", "all-plain-0", "default-gentle-0", "ablate/row-7", "paper-all"]
    kept = [f"{name}-control" for name in converted]
    joined = [*converted, *kept, *(f"{name}-free{more}" for name in ("all", "default") for more in ("", "-window128"))]
    joined += [f"{name}-{rival}" for name in ("all", "default") for rival in rivals]
    kinds.append(("join", JOINS, [options.runs / name / "model" for name in joined]))
    unbounded = ["eight-0", "ablate/row-7", "paper-all", *kept]  # long recordings do them no good: cut for them, too
    kinds.append(("chunk", (*JOINS, "--chunk", "20"), [options.runs / name / "model" for name in unbounded]))
    kinds.append(("tau", TAUS, [options.runs / name / "model" for name in ("ablate/row-7", "paper-hard")]))
    jobs = []
    for kind, more, chosen in kinds:
        for model in chosen if kind in options.kinds.split(",") else ():
            done = options.runs / "measured" / kind / str(model.relative_to(options.runs)).replace("/", "_")
            if (model / "plan.json").is_file() and not done.exists():
                command = ["evaluate", "--model", str(model), "--data", str(options.data / "test-clean"), *more]
                command += ["--device", options.device, "--batch-seconds", str(options.batch)]
                command += ["--limit", str(options.limit)] if options.limit else []
                command += ["--record", "--results", str(options.results)]
                jobs.append(Job(f"{kind} {model}", tuple(command), done))
    return jobs


def lane(queue, training, options: argparse.Namespace, deadline: float) -> None:
    """One process: a command after the other until there are none or time is up; what one makes is measured at once.

    What is left to measure then, while others still train, is done by whoever is free.
    """
    for job in iter(queue.get, None):
        while job.after is not None and not job.after.exists() and time.time() < deadline:
            time.sleep(0.5)
        if not job.makes.exists() and time.time() < deadline:
            do(job, options, deadline)
        if options.measure and (job.makes.parent / "model").is_dir():
            measure(options, deadline, job.makes.parent / "model")
    with training.get_lock():
        training.value -= 1
    while options.measure and time.time() < deadline:
        others_train = training.value
        measure(options, deadline)
        if not others_train:
            return
        time.sleep(1)


def measure(options: argparse.Namespace, deadline: float, model: Path | None = None) -> None:
    """Whatever there is to measure, or of one model alone, that no other lane has taken."""
    for job in measurements(options):
        if time.time() < deadline and (model is None or str(model) in job.command) and claimed(job, options):
            do(job, options, deadline)


def claimed(job: Job, options: argparse.Namespace) -> bool:
    try:
        (options.runs / "claims" / job.name.replace("/", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def do(job: Job, options: argparse.Namespace, deadline: float) -> None:
    """One command, with a log of its own."""
    from lpa.cli import app

    command = [*job.command]
    if command[0] != "evaluate":
        command += ["--max-minutes", f"{(deadline - time.time()) / 60:.2f}"]
    sys.argv = ["lpa", *command]  # what records name
    log = options.runs / "logs" / f"{job.name.replace('/', '_')}.log"
    began = time.time()
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            app(command, standalone_mode=False)
            if command[0] == "evaluate":
                job.makes.parent.mkdir(parents=True, exist_ok=True)
                job.makes.touch()
        except (Exception, SystemExit):
            traceback.print_exc()
    state = "done" if job.makes.exists() else "not done, see its log"
    print(f"{job.name}: {state}, {time.time() - began:.0f} s", flush=True)
    tidy()


def tidy() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(jobs: list[Job], options: argparse.Namespace) -> None:
    shutil.rmtree(options.runs / "claims", ignore_errors=True)  # of lanes that are no more
    for name in ("logs", "claims"):
        (options.runs / name).mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    queue, deadline = spawn.Queue(), time.time() + 60 * options.minutes
    todo = [job for job in jobs if not job.makes.exists()]
    lanes = min(options.lanes, len(todo))
    training = spawn.Value("i", lanes)
    for job in [*todo, *[None] * lanes]:
        queue.put(job)
    team = [spawn.Process(target=lane, args=(queue, training, options, deadline)) for _ in range(lanes)]
    for process in team:
        process.start()
    for process in team:
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure", "list"))
    parser.add_argument("--data", type=Path, required=True, help="folder that holds dev-clean and test-clean")
    parser.add_argument("--synthetic", type=Path, help="more speech to train on")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--enhance", type=Path, default=Path("lpa/models/enhance"))
    parser.add_argument("--runs", type=Path, default=Path("runs/table"))
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="of decoded speech")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--only", default="", help="jobs whose names match this pattern")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--device", default="cuda", help="what is measured on")
    parser.add_argument("--lr", type=float, default=2.5e-4, help="of the recipe best")
    parser.add_argument("--epochs", type=float, default=2.0, help="of the recipe best")
    parser.add_argument("--scale", type=float, default=1.0, help="of the epochs of sweeps and of the paper's recipe")
    parser.add_argument("--set", action="append", default=[], help="key=value, for everything that trains")
    parser.add_argument("--measure", action="store_true", help="measure each model as soon as it is made")
    parser.add_argument("--kinds", default="whole,join,chunk,tau", help="of what is measured")
    parser.add_argument("--limit", type=int, help="measure on so many utterances")
    parser.add_argument("--batch", type=int, default=600, help="measure in batches of so many seconds")
    options = parser.parse_args()
    jobs = measurements(options) if options.what == "measure" else Table(options).all_jobs()
    jobs = [job for job in jobs if re.search(options.only, job.name)]
    if options.what == "list":
        print("\n".join(f"{job.name}\tlpa {shlex.join(job.command)}" for job in jobs))
    else:
        run(jobs, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
