"""`echelon data`: get, create, check, describe, extract and convert data.

`create` has the commands that write new data (get, im2rec, convert), `records` those that read record files (rec2idx,
info, verify, extract), `common` what all of them share.
"""

from __future__ import annotations

from echelon.cli.data import create, records
from echelon.cli.data.common import Commands


def add_parser(subparsers: Commands) -> None:
    """Add `data` and its commands to the main parser."""
    about = "Get published sets; create, check, describe, extract and convert RecordIO files (.rec, .idx, .lst)."
    commands = subparsers.add_parser("data", help="get, create and check data", description=about).add_subparsers(
        dest="data_command", metavar="COMMAND", required=True
    )
    create.add_get(commands)
    create.add_im2rec(commands)
    create.add_convert(commands)
    records.add_rec2idx(commands)
    records.add_info(commands)
    records.add_verify(commands)
    records.add_extract(commands)
