"""`echelon score`: measure a checkpoint on a validation set, with every image counted once.

Prints the same lines as MXNet's score.py: the speed, and one tuple per metric. The network, the shape of its images and
their mean and std come from the checkpoint, unless flags replace them.
"""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data.loading.loader import Batches
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import FolderSource, RecordSource, Source
from echelon.data.progress import Advance, bar
from echelon.data.records.class_file import merge_class_names
from echelon.data.sets.datasets import DataOptions, dataset_names, make_loader, open_dataset
from echelon.errors import DataError, UsageError
from echelon.launch.devices import parse_devices
from echelon.train.checkpoint.format import Checkpoint
from echelon.train.checkpoint.mxnet.recognise import Wanted
from echelon.train.checkpoint.names import load_model
from echelon.train.flags.arguments import parse_numbers
from echelon.train.flags.check import check_numbers
from echelon.train.loop.threads import limit_threads
from echelon.train.predict import classes_of, model_of, preprocessing_of
from echelon.train.recipe.options import METRICS
from echelon.train.step.metrics import Metrics

log = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `score`."""
    parser = subparsers.add_parser("score", help="measure a checkpoint on a validation set", description=__doc__)
    add_model_flags(parser)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-val", metavar="FILE|FOLDER", help="a .rec file, or a folder with one folder per class")
    data.add_argument("--data", metavar="NAME", help=f"use the validation data of {', '.join(dataset_names())}")
    parser.add_argument("--data-dir", default="data", help="folder of the files of --data")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass")
    parser.add_argument(
        "--data-nthreads",
        type=int,
        default=4,
        help="decoding processes; for small data sets, threads",
    )
    parser.add_argument("--skip-bad-records", action="store_true", help="skip and count records that cannot be read")
    parser.add_argument("--top-k", type=int, default=5, help="also show the top-K accuracy; 0: do not")
    parser.add_argument(
        "--metrics",
        default="",
        metavar="NAMES",
        help=f"also show these, separated by commas: {', '.join(METRICS)}",
    )
    parser.add_argument("--rgb-mean", metavar="R,G,B", help="mean of the images (default: the checkpoint's)")
    parser.add_argument("--rgb-std", metavar="R,G,B", help="standard deviation (default: the checkpoint's)")
    parser.add_argument("--image-shape", metavar="C,H,W", help="input of the network (default: the checkpoint's)")
    parser.add_argument(
        "--resize",
        type=int,
        default=0,
        metavar="N",
        help="first scale the shorter side to N pixels; 0: only crop the centre, as in training",
    )
    parser.set_defaults(run=run)


def add_model_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the flags that choose a trained model and its device. Without a default, --model is required."""
    parser.add_argument(
        "--model",
        required=default is None,
        default=default,
        metavar="FOLDER|FILE|PREFIX",
        help="a run folder such as runs/latest, a checkpoint file (or MXNet's .params file), or the prefix of several",
    )
    parser.add_argument("--load-epoch", type=int, metavar="K", help="use PREFIX-000K (default: the newest valid file)")
    parser.add_argument("--gpus", default="", metavar="ID", help="the GPU to use (default: the CPU)")


def show_log() -> None:
    """Write log lines to standard error, one sentence each."""
    logging.basicConfig(level=logging.INFO, format="echelon: %(message)s")


def run(options: argparse.Namespace) -> int:
    """Score the checkpoint that the command line names."""
    show_log()
    check_numbers(vars(options))
    metrics, device = Metrics(top_k=options.top_k, others=options.metrics), device_of(options.gpus)
    image_shape = parse_numbers("--image-shape", options.image_shape, int, 3)
    checkpoint, path = load_model(options.model, options.load_epoch, Wanted(image_shape=image_shape))
    if options.resize < 0:
        raise UsageError(f"--resize must be 0 or more, not {options.resize}")
    preprocessing = preprocessing_of(with_flags(checkpoint, options), path, options.resize or -1)
    model = model_of(checkpoint, path).to(device).eval()
    limit_threads(model, preprocessing.shape, options.batch_size, device)
    num_classes = count_classes(model, preprocessing.shape, device)
    metrics.check_classes(num_classes)
    source = source_of(options, num_classes, classes_of(checkpoint, path))
    sampling = Sampling(len(source), options.batch_size, shuffle=False)
    loader = make_loader(
        source,
        preprocessing,
        sampling,
        threads=options.data_nthreads,
        exact=True,
        skip_bad_records=options.skip_bad_records,
    )
    with bar(path.name, len(source)) as advance, closing(loader):
        start = time.perf_counter()
        sums = sums_of(model, loader, metrics, num_classes, device, advance)
        values = metrics.values(sums)
        seconds = time.perf_counter() - start
    print(f"Finished with {float(sums[-1]) / seconds:f} images per second")
    for pair in values.items():
        print(pair)
    return 0


def sums_of(
    model: nn.Module, loader: Batches, metrics: Metrics, num_classes: int, device: torch.device, advance: Advance
) -> Tensor:
    """Return the sums of the metrics over an epoch, in float64 because float32 counts exactly only to 16 million."""
    total = torch.zeros(metrics.num_sums, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for images, labels in loader:
            check_labels(labels, num_classes)
            total += metrics.measure(model(images.to(device)), labels.to(device))
            advance(len(images))
    return total


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Reject labels that are not classes of the network; they would silently count as wrong predictions."""
    if labels.dim() != 1:
        raise DataError(f"the images have {labels.shape[1]} labels each; a score needs one class number per image")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"an image has the label {wrong}, but the network has the classes 0 to {num_classes - 1}")


def count_classes(model: nn.Module, shape: tuple[int, int, int], device: torch.device) -> int:
    """Return the number of the network's outputs; rejects an unsuitable image shape before any image is read."""
    try:
        with torch.inference_mode():
            return int(model(torch.zeros(1, *shape, device=device)).shape[1])
    except RuntimeError as error:
        given = ",".join(map(str, shape))
        raise UsageError(f"the network does not accept images of {given}: {error}; leave --image-shape out") from error


def with_flags(checkpoint: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """Return the checkpoint with the preprocessing flags given here in place of the run's."""
    given: dict[str, Any] = {}
    for name, kind, count in (("rgb_mean", float, None), ("rgb_std", float, None), ("image_shape", int, 3)):
        numbers = parse_numbers(f"--{name.replace('_', '-')}", getattr(options, name), kind, count)
        if numbers is not None:
            given[name] = numbers
    trained = checkpoint.metadata.get("options") or {}
    return replace(checkpoint, metadata={**checkpoint.metadata, "options": {**trained, **given}})


def source_of(options: argparse.Namespace, num_classes: int, classes: tuple[str, ...]) -> Source:
    """Open the validation images. Folders named as `classes`, the names in the checkpoint, get their numbers."""
    if options.data is not None:
        dataset = open_dataset(
            options.data, DataOptions(data_dir=options.data_dir, skip_bad_records=options.skip_bad_records)
        )
        if dataset.validation is None:
            raise UsageError(f"--data {options.data} has no validation data in {options.data_dir}; give --data-val")
        return dataset.validation
    path = Path(options.data_val)
    if not path.is_dir() or list(path.glob("*.rec")):
        records = records_of(options, num_classes)
        merge_class_names([(options.model, classes), (path, records.classes)])  # raises if they differ
        return records
    folders = FolderSource.from_known_classes(path, classes)
    if folders.classes == classes:
        return folders
    if len(folders.classes) != num_classes:
        raise DataError(
            f"{path} has folders for {len(folders.classes)} classes, but the network has {num_classes}; classes are "
            "numbered by the order of their folders, so create an empty folder for a class without images"
        )
    return folders


def records_of(options: argparse.Namespace, num_classes: int) -> RecordSource:
    """Open record files; with --skip-bad-records, records with an invalid label are skipped too, as in training."""
    if not options.skip_bad_records:
        return RecordSource(options.data_val)
    bad: list[DataError] = []
    source = RecordSource(options.data_val, on_bad=bad.append)
    source.num_classes = num_classes
    if bad:
        log.warning("bad records skipped while opening: %d, the first: %s", len(bad), bad[0])
    return source


def device_of(gpus: str) -> torch.device:
    """Return the device for --gpus, which names one GPU or none."""
    if "," in gpus:
        raise UsageError(f"--gpus {gpus}: this command uses one GPU; give one number, for example --gpus 0")
    return torch.device(parse_devices(gpus, None)[0])
