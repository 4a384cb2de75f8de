"""Hosts files: what a line may say, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import UsageError
from echelon.launch.hosts import Host, parse_hosts, read_hosts


def test_every_form_of_a_line() -> None:
    lines = ["10.0.0.1", "", "# a comment", "node-2 slots=3  # fast", "anna@node-3:2222"]
    lines += ["root@node-4 slots=2 max_slots=4", "[fe80::1]"]
    assert parse_hosts("\n".join(lines)) == (
        Host("10.0.0.1"),
        Host("node-2", slots=3),
        Host("node-3", user="anna", port=2222),
        Host("node-4", slots=2, user="root"),
        Host("fe80::1"),
    )


def test_a_host_that_is_listed_twice_has_the_slots_of_both_lines() -> None:
    assert parse_hosts("a\nb\na slots=2\n") == (Host("a", slots=3), Host("b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb c\n", "hosts, line 2: 'c' is unknown; after a host only slots=NUMBER may follow"),
        ("a slots=0", "hosts, line 1: 'slots=0'; the number of slots must be 1 or more"),
        ("a slots=two", "hosts, line 1: 'slots=two'; the number of slots must be 1 or more"),
        ("a:70000", "hosts, line 1: 70000 is not a port; write a number from 1 to 65535"),
        ("a@b@c", "hosts, line 1: 'a@b@c' is not a host; write host, user@host or user@host:port"),
        (
            "-oProxyCommand=x",
            "hosts, line 1: '-oProxyCommand=x' is not a host; write host, user@host or user@host:port",
        ),
        ("-x@host", "hosts, line 1: '-x@host' is not a host; write host, user@host or user@host:port"),
        ("# none\n", "the hosts file hosts names no host; write one per line"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert str(error.value) == message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory; give one with -H"):
        read_hosts(str(tmp_path / "nosuch"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not a text file"):
        read_hosts(str(tmp_path / "binary"))
