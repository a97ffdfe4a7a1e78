"""Run a training, killing it at random moments, until it ends: python kill_train.py CONFIG.json KILLS SEED

Every run is a process of its own, forked after the imports; the kill is a SIGKILL, which no code can prepare for.
Prints the records there were whenever it was killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from lpa.recipe import TrainConfig
from lpa.train import train


def start(config: TrainConfig) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(config)
            code = 0
        finally:
            os._exit(code)
    return child


def recorded(config: TrainConfig) -> int:
    """Steps in the records; the last line may be half written."""
    path = Path(config.out) / "train.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def main(path: str, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    config = TrainConfig.from_dict(json.loads(Path(path).read_text()))
    rng = random.Random(seed)
    killed = []
    for target in sorted(rng.sample(range(1, config.steps - 2), kills)):
        child = start(config)
        while recorded(config) < target:
            if os.waitpid(child, os.WNOHANG)[0]:
                sys.exit("the training ended before it could be killed")
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed.append(recorded(config))
    code = os.waitstatus_to_exitcode(os.waitpid(start(config), 0)[1])
    print(json.dumps(killed))
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
