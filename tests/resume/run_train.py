"""Run a training from its config: python run_train.py CONFIG.json"""

import json
import sys

import torch

from lpa.recipe import TrainConfig
from lpa.train import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        train(TrainConfig.from_dict(json.load(file)))
