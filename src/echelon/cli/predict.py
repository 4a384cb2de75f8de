"""`echelon predict`: classify image files with a trained network.

    echelon predict photo.jpg more/*.png                     # the newest run: runs/latest
    echelon predict --model prefix-0012.safetensors photos/  # all images under a folder

Prints the likeliest classes of every file, by name if the checkpoint has names. A file that cannot be read gets one
line on standard error, the others are still classified, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.cli.score import add_model_flags, device_of, show_log
from echelon.data.loading.sources import IMAGE_SUFFIXES, image_files
from echelon.errors import DataError, UsageError
from echelon.train.flags.check import check_numbers
from echelon.train.predict import Predictor, Ranking


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `predict`."""
    parser = subparsers.add_parser(
        "predict",
        help="classify image files with a checkpoint",
        description="Print the likeliest classes of image files, by name if the checkpoint has names. A file that "
        "cannot be read gets one line on standard error, the others are still classified, and the exit status is 1.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="an image, or a folder of images")
    add_model_flags(parser, default="runs/latest")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="show the N likeliest classes")
    parser.add_argument(
        "--resize",
        type=int,
        metavar="N",
        help="first scale the shorter side to N pixels; 0: only crop the centre, as validation does (default: images "
        "whose shorter side is longer than 8/7 of the network's input are scaled down to that)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per file and line")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Classify the files; returns 1 if one of them could not be read."""
    show_log()
    check_numbers(vars(options))
    for name, low in (("top", 1), ("resize", 0)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"--{name} must be {low} or more, not {value}")
    predictor = Predictor.load(
        options.model,
        device_of(options.gpus),
        epoch=options.load_epoch,
        resize=options.resize or -1,
        scale_down=options.resize is None,
    )
    print_result = print_json if options.json else print_table
    status = 0
    for name, result in classify(predictor, find_images(options.files), options.batch_size, options.top):
        if isinstance(result, DataError):
            status = 1
            print(f"echelon: {result}", file=sys.stderr)
        print_result(predictor, name, result)
    return status


def find_images(names: Sequence[str]) -> list[str]:
    """Return the names of files, with every folder replaced by its images; a folder without images stays."""
    found: list[str] = []
    for name in names:
        images = image_files(Path(name)) if Path(name).is_dir() else []
        found += [str(path) for path in images] or [name]
    return found


def classify(
    predictor: Predictor, names: Sequence[str], batch_size: int, top: int
) -> Iterator[tuple[str, Ranking | DataError]]:
    """Yield the ranking of every file, or the error of one that cannot be read, in order."""
    for start in range(0, len(names), batch_size):
        part = names[start : start + batch_size]
        prepared = [prepare(predictor, name) for name in part]
        images = [one for one in prepared if not isinstance(one, DataError)]
        rankings = iter(predictor(torch.cat(images), top) if images else [])
        for name, one in zip(part, prepared, strict=True):
            yield name, one if isinstance(one, DataError) else next(rankings)


def prepare(predictor: Predictor, name: str) -> Tensor | DataError:
    """Return a batch of one image, or the error if it cannot be read."""
    if Path(name).is_dir():
        suffixes = ", ".join(IMAGE_SUFFIXES)
        return DataError(f"{name}: the folder has no images; searched it for {suffixes}")
    try:
        return predictor.prepare([name])
    except DataError as error:
        return error


def print_table(predictor: Predictor, name: str, result: Ranking | DataError) -> None:
    """Print the name of a file, then one line per class; nothing for an error, which is on standard error."""
    if not isinstance(result, DataError):
        print(name)
        for number, probability in result:
            print(f"  {probability:8.2%}  {predictor.name(number)}", flush=True)


def print_json(predictor: Predictor, name: str, result: Ranking | DataError) -> None:
    """Print one line with a JSON object: the file, and its predictions or the error."""
    if isinstance(result, DataError):
        print(json.dumps({"file": name, "error": str(result)}), flush=True)
        return
    predictions = [
        {"class": number, "name": predictor.name(number), "probability": probability} for number, probability in result
    ]
    print(json.dumps({"file": name, "predictions": predictions}), flush=True)
