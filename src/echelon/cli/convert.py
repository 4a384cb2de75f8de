"""`echelon convert`: convert trained models from and to MXNet's .params files.

    echelon convert prefix-0012.params model.safetensors    # uses prefix-symbol.json if it is there
    echelon convert runs/latest prefix-0012.params          # with the names of MXNet's script

The network, its depth, classes and image shape are recognised by the arrays; flags replace what is recognised.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.cli.score import show_log, with_flags
from echelon.data.records.class_file import write_class_names
from echelon.errors import UsageError
from echelon.train.checkpoint.format import save
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet import params
from echelon.train.checkpoint.mxnet.recognise import Wanted
from echelon.train.checkpoint.names import SUFFIX, load_model
from echelon.train.flags.arguments import parse_numbers
from echelon.train.flags.check import check_numbers
from echelon.train.predict import classes_of, model_of

_NETWORK_FLAGS = ("network", "num_layers", "num_classes", "image_shape", "rgb_mean", "rgb_std")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="convert trained models from and to MXNet's .params files",
        description="Convert a trained model of MXNet (prefix-0012.params, with prefix-symbol.json if it is there) to "
        f"a checkpoint ({SUFFIX}), or a checkpoint of Echelon to a .params file with the names of MXNet's script.",
    )
    parser.add_argument(
        "source", metavar="MODEL", help="a .params file, checkpoint file, run folder, or prefix of files"
    )
    parser.add_argument("target", metavar="OUT", help=f"the file to write: OUT{SUFFIX} or OUT{params.SUFFIX}")
    parser.add_argument("--load-epoch", type=int, metavar="K", help="of a prefix, use the file of epoch K")
    parser.add_argument("--network", help="the network of a .params file (default: by the names of its arrays)")
    parser.add_argument("--num-layers", type=int, help="its depth (default: by the number of its arrays)")
    parser.add_argument("--num-classes", type=int, help="its classes (default: by the shape of its last layer)")
    parser.add_argument("--image-shape", metavar="C,H,W", help="its input (default: the size for which it is designed)")
    parser.add_argument("--rgb-mean", metavar="R,G,B", help="mean of its images (default: as in MXNet's scripts)")
    parser.add_argument("--rgb-std", metavar="R,G,B", help="standard deviation (default: as in MXNet's scripts)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert the model that the command line names."""
    show_log()
    check_numbers(vars(options))
    target = Path(options.target)
    if target.suffix not in (SUFFIX, params.SUFFIX):
        raise UsageError(f"OUT is {target}; give a file name that ends with {SUFFIX} or {params.SUFFIX}")
    wanted = Wanted(
        options.network,
        options.num_layers,
        options.num_classes,
        parse_numbers("--image-shape", options.image_shape, int, 3),
    )
    checkpoint, path = load_model(options.source, options.load_epoch, wanted)
    is_mxnets = path.suffix == params.SUFFIX
    if is_mxnets == (target.suffix == params.SUFFIX):
        other = SUFFIX if is_mxnets else params.SUFFIX
        raise UsageError(f"{path} and {target} have the same format; give a file name that ends with {other}")
    if is_mxnets:
        save(target, with_flags(checkpoint, options))
    else:
        _reject_network_flags(options, path)
        params.save(target, mxnet.arrays_of(checkpoint.metadata["network"], model_of(checkpoint, path)))
        write_class_names(target, classes_of(checkpoint, path))
    print(f"Saved {target}")
    return 0


def _reject_network_flags(options: argparse.Namespace, path: Path) -> None:
    given = [f"--{name.replace('_', '-')}" for name in _NETWORK_FLAGS if getattr(options, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: {path} says what its network is; give them only with a .params file")
