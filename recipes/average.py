"""The mean of two models' weights: python recipes/average.py FIRST OTHER --share 0.5 [--keep PATTERN] --out DIR

FIRST and OTHER are model folders with the same tensors, of one training history, or the mean means nothing. OTHER has
`--share` of every tensor, except of those named like `--keep`, which stay as FIRST has them.
"""

import argparse
import fnmatch
import sys

import torch

from lpa import families
from lpa.surgery import save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("other")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--keep", default="")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    model, other = families.load(options.first), families.load(options.other).state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not fnmatch.fnmatchcase(name, options.keep):
                value.lerp_(other[name].to(value.dtype), options.share)
    save(model, options.out, weights="float16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
