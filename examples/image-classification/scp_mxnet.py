"""Copy this checkout of Echelon to the same path on the machines of a hosts file.

    python scp_mxnet.py

`hosts` has one machine per line, as for `echelon launch -H hosts`; ssh must be able to log in without a password. The
name is that of MXNet's script, which copied MXNet. The machines also need Python with the packages of
`pip install -e .`, because an environment (.venv) belongs to one machine and is not copied.
"""

import argparse
import sys
from pathlib import Path

from echelon.errors import EchelonError
from echelon.launch.hosts import read_hosts
from echelon.launch.ssh.client import SshClient
from echelon.launch.ssh.sync import NOT_COPIED, Copy, copy_to_hosts

CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Copy, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-H", "--hostfile", default="hosts", help="file with one host per line (default: hosts)")
    parser.add_argument("--ssh-option", action="append", default=[], metavar="NAME=VALUE", help="as in ssh -o")
    parser.add_argument("--ssh-config", metavar="FILE", help="as in ssh -F")
    options = parser.parse_args()
    client = SshClient(options.ssh_config, tuple(options.ssh_option))
    try:
        copy_to_hosts(Copy(CHECKOUT, str(CHECKOUT), client, (*NOT_COPIED, "/.peers")), read_hosts(options.hostfile))
    except EchelonError as error:
        print(f"scp_mxnet.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
