"""The mean of two models' weights: python recipes/average.py FIRST OTHER --share 0.5 [--keep PATTERN] --out DIR

FIRST and OTHER are model folders with the same tensors, of one training history, or the mean means nothing. OTHER has
`--share` of every tensor, except of those named like `--keep`, which stay as FIRST has them. Of several shares the one
is kept that reads `--held-out` speakers of `--data` best.
"""

import argparse
import copy
import fnmatch
import sys

import torch
from accelerate import Accelerator

from lpa import families
from lpa.data import AudioBank, open_sources
from lpa.surgery import save
from lpa.task import task_of
from lpa.train import TrainConfig


def mean(model, other, share: float, keep: str):
    model, values = copy.deepcopy(model), other.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not fnmatch.fnmatchcase(name, keep):
                value.lerp_(values[name].to(value), share)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("other")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5])
    parser.add_argument("--keep", default="")
    parser.add_argument("--data")
    parser.add_argument("--held-out", default="")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    if len(options.share) > 1 and not options.data:
        parser.error("several shares are judged by speech; name it with --data and --held-out")
    first, other = families.load(options.first), families.load(options.other)
    means = {share: mean(first, other, share, options.keep) for share in options.share}
    if len(means) > 1:
        accelerator = Accelerator()
        bank = AudioBank(open_sources([options.data], include=options.held_out.split(",")))
        task = task_of(first)
        feed = task.feed(first, bank, accelerator.device, TrainConfig(family=first.family))
        evaluate = task.evaluation(feed, accelerator, 600)
        found = {share: evaluate(model.to(accelerator.device).eval())["wer"] for share, model in means.items()}
        print("  ".join(f"{share:g}: {wer:.2f} %" for share, wer in found.items()))
        means = {share: means[share].cpu() for share in [min(found, key=found.__getitem__)]}
    save(next(iter(means.values())), options.out, weights="float16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
