"""Measure how many images per second networks classify: forward passes only, on synthetic images.

    python benchmark_score.py                                     # ten networks with five batch sizes: this takes long
    python benchmark_score.py --network resnet-50 --batch-size 32

Uses the first GPU, if there is one, in float32 and float16, and then the CPU.
"""

import argparse
import logging
import sys

from echelon.bench.forward import BATCH_SIZES, NETWORKS, log_speeds
from echelon.errors import EchelonError
from echelon.train.script import LOG_FORMAT

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--network", default="all", help=f"all, or a network, for example one of {', '.join(NETWORKS)}")
parser.add_argument("--batch-size", type=int, default=0, help=f"0: {', '.join(map(str, BATCH_SIZES))}")

if __name__ == "__main__":
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    if given.network == "all":
        logging.info("It may take some time to run all models, set --network to run a specific one")
    if given.batch_size == 0:
        logging.info("run batchsize [1, 32, 64, 128, 256] by default, set --batch-size to run a specific one")
    try:
        if given.batch_size < 0:
            parser.error(f"--batch-size must be 0 or more, not {given.batch_size}")
        log_speeds(
            NETWORKS if given.network == "all" else [given.network],
            [given.batch_size] if given.batch_size else BATCH_SIZES,
        )
    except EchelonError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
