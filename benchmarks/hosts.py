"""Two hosts on this machine for benchmarks between hosts: network namespaces, each with its own sshd. Needs root.

    python -m benchmarks.hosts -- echelon bench pushpull --hosts h1,h2 --transport tcp -n 1 -s 1 --peer iperf3
    python -m benchmarks.hosts --rate 1gbit -- echelon bench train --hosts h1,h2 --transport tcp --peer ddp

runs a command where `ssh h1` and `ssh h2` work. `--rate` limits what each host sends. The hosts share this machine's
memory: use `--transport tcp`. `tests/system/install.sh` installs what this needs; iperf3 is Debian's package.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    """Make the hosts, run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="limit of what each host sends, as tc writes it: 1gbit")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if command[:1] == ["echelon"]:
        command = [sys.executable, "-m", *command]
    sys.path[:0] = [str(TESTS), str(TESTS / "system")]
    from hosts import make_hosts

    with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder), 2) as network:
        if args.rate:
            for host in network.hosts:
                limit = ["tbf", "rate", args.rate, "burst", "256kb", "latency", "50ms"]
                host.run(["tc", "qdisc", "add", "dev", "eth0", "root", *limit])
        with network.login.start(command, cwd=Path.cwd(), stdout=None, stderr=None) as process:  # type: ignore[arg-type]
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
