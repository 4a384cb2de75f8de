"""The groups and data_sharding files: the examples of seed 001, ranks, and every kind of error."""

from __future__ import annotations

import re

import pytest

from echelon.cluster.shares import (
    check_shares,
    groups_text,
    inline_groups,
    parse_groups,
    parse_shares,
    read_groups,
    read_shares,
    shares_text,
)
from echelon.errors import UsageError

SEED_GROUPS = "10.10.10.21\n10.10.10.22 10.10.10.23\n10.10.10.24 10.10.10.25 10.10.10.26\n"
SEED_HOSTS = {rank: f"10.10.10.{21 + rank}" for rank in range(6)}
SEED_SHARES = "0 0.3\n0.3 1\n"
TWO_HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def refused(message: str) -> pytest.RaisesExc[UsageError]:
    return pytest.raises(UsageError, match=re.escape(message))


# --- groups


def test_groups_of_the_seed() -> None:
    assert parse_groups(SEED_GROUPS, SEED_HOSTS) == ((0,), (1, 2), (3, 4, 5))


def test_groups_follow_ranks_not_addresses() -> None:
    hosts = {rank: SEED_HOSTS[5 - rank] for rank in range(6)}
    assert parse_groups(SEED_GROUPS, hosts) == ((5,), (3, 4), (0, 1, 2))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("0 1\n2 3", ((0, 1), (2, 3))),
        ("3 0\n1\n2", ((0, 3), (1,), (2,))),
        ("a\nb", ((0, 1), (2, 3))),
        ("a b", ((0, 1, 2, 3),)),
        ("a b\na b", ((0, 2), (1, 3))),  # each mention is one worker
        ("a\nb\na\nb\n", ((0,), (2,), (1,), (3,))),
        ("a a\nb", ((0, 1), (2, 3))),
        ("a\n2 3", ((0, 1), (2, 3))),
        ("\n  a\t b \r\n\n", ((0, 1, 2, 3),)),
    ],
)
def test_groups_by_hosts_and_ranks(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, TWO_HOSTS) == groups


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my file contains no groups"),
        (" \n\n", "my file contains no groups"),
        ("0 1\n\n2 3 4", "my file line 3: worker 4 does not exist; ranks go from 0 to 3"),
        ("0 1\n2 3\n1", "my file line 3: worker 1 is already in line 1"),
        ("0 0 1\n2 3", "my file line 1: worker 0 is already in line 1"),
        ("a\nb c", "my file line 2: no worker runs on 'c'; the workers' hosts are a, b"),
        ("a\n0\nb", "my file line 2: worker 0 is already in line 1"),
        ("a a\na\nb", "my file line 2: host a is named 3 times but has fewer workers"),
        ("0 1\n3", "my file: no group contains worker 2 (b); every worker must be in one group"),
        ("a", "my file: no group contains worker 2 (b), 3 (b)"),
        ("a -1\nb", "my file line 1: no worker runs on '-1'"),
        ("a b ²", "my file line 1: no worker runs on '²'"),  # str.isdigit accepts it, int does not
    ],
)
def test_an_error_in_a_groups_file_names_the_line(text: str, message: str) -> None:
    with refused(message):
        parse_groups(text, TWO_HOSTS, "my file")


def test_a_host_named_less_often_than_it_has_workers_is_an_error() -> None:
    with refused("groups: no group contains worker 2 (a)"):
        parse_groups("a\na", {0: "a", 1: "a", 2: "a"})


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("0 1 2 / 3", "0 1 2 \n 3"),
        ("0/1", "0\n1"),
        ("7", "7"),
        ("0,1/2", "0 1\n2"),
        (",", None),
        ("groups", None),
        ("10.10.10.21", None),
        ("./0", None),
        ("", None),
        (" / ", None),
    ],
)
def test_groups_given_inline(text: str, lines: str | None) -> None:
    assert inline_groups(text) == lines


def test_inline_groups_are_parsed_like_a_file() -> None:
    lines = inline_groups("0 1 2 / 3")
    assert lines is not None
    assert parse_groups(lines, TWO_HOSTS) == ((0, 1, 2), (3,))


# --- data_sharding


def test_shares_of_the_seed() -> None:
    assert parse_shares(SEED_SHARES, 2) == [(0.0, 0.3), (0.3, 1.0)]


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("0 1", [(0.0, 1.0)]),
        ("0.5 1\n0 .5", [(0.5, 1.0), (0.0, 0.5)]),  # line r + 1 belongs to rank r; shares may have any order
        ("0 0.1\n\n0.1 0.2\r\n  0.2\t1  \n", [(0.0, 0.1), (0.1, 0.2), (0.2, 1.0)]),
        ("0 0.333333333333\n0.3333333333333 1", [(0.0, 0.333333333333), (0.3333333333333, 1.0)]),
        ("0 1e-1\n1e-1 1.0", [(0.0, 0.1), (0.1, 1.0)]),
    ],
)
def test_shares(text: str, shares: list[tuple[float, float]]) -> None:
    assert parse_shares(text, len(shares)) == shares


def test_ten_tenths_cover_everything() -> None:
    text = "\n".join(f"{tenth / 10} {(tenth + 1) / 10}" for tenth in range(10))
    assert len(parse_shares(text, 10)) == 10


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        (SEED_SHARES, 3, "f has 2 lines for 3 workers; write one line per worker"),
        ("", 2, "f has 0 lines for 2 workers"),
        (SEED_SHARES + "0 1", 2, "f has 3 lines for 2 workers"),
        ("0 0.3\n0.4 1", 2, "f line 2: the share from 0.4 to 1 leaves a gap after the share that ends at 0.3"),
        ("0.1 0.3\n0.3 1", 2, "f line 1: the share from 0.1 to 0.3 leaves a gap after the share that ends at 0"),
        ("0 0.3\n\n0.2 1", 2, "f line 3: the share from 0.2 to 1 overlaps the share that ends at 0.3"),
        ("0 0.5\n0 0.5", 2, "f line 2: the share from 0 to 0.5 overlaps the share that ends at 0.5"),
        ("0 1\n0.2 0.3", 2, "f line 2: the share from 0.2 to 0.3 overlaps the share that ends at 1"),
        ("0 0.3\n0.3 0.9", 2, "f line 2: the shares end at 0.9; they must cover the data up to 1"),
        ("0.3 0.9\n0 0.3", 2, "f line 1: the shares end at 0.9"),  # the line with the last share, not the last line
        ("0 0.3\n0.3", 2, "f line 2: '0.3' is not two numbers; write 'start end', for example '0 0.3'"),
        ("0 0.3 1\n0.3 1", 2, "f line 1: '0 0.3 1' is not two numbers"),
        ("0 0.3\n0.3 all", 2, "f line 2: '0.3 all' is not two numbers"),
        ("0 0,3\n0,3 1", 2, "f line 1: '0 0,3' is not two numbers"),
        ("0 0.3\n0.3 1.1", 2, "f line 2: start 0.3 and end 1.1 must satisfy 0 <= start < end <= 1"),
        ("-0.1 0.3\n0.3 1", 2, "f line 1: start -0.1 and end 0.3 must satisfy"),
        ("0 0\n0 1", 2, "f line 1: start 0 and end 0 must satisfy"),
        ("0.3 0\n0.3 1", 2, "f line 1: start 0.3 and end 0 must satisfy"),
        ("0 nan\n0 1", 2, "f line 1: start 0 and end nan must satisfy"),
        ("0 inf\n0 1", 2, "f line 1: start 0 and end inf must satisfy"),
    ],
)
def test_an_error_in_a_data_sharding_file_names_the_line(text: str, workers: int, message: str) -> None:
    with refused(message):
        parse_shares(text, workers, "f")


def test_check_shares_uses_the_given_names() -> None:
    check_shares([(0.5, 1.0), (0.0, 0.5)], ["fast", "slow"])
    with refused("slow: the share from 0.1 to 0.5 leaves a gap after the share that ends at 0"):
        check_shares([(0.5, 1.0), (0.1, 0.5)], ["fast", "slow"])


def test_groups_and_shares_as_text_are_read_without_a_loss() -> None:
    groups = [[1], [0, 2]]
    assert read_groups(groups_text(groups), {0: "a", 1: "b", 2: "c"}) == groups
    shares = [(0.0, 1 / 3), (1 / 3, 1e-5 + 1 / 3), (1e-5 + 1 / 3, 1.0)]
    assert read_shares(shares_text(shares), 3) == shares


def test_a_share_given_as_text_is_checked_like_a_file() -> None:
    with pytest.raises(UsageError, match=r"^data sharding '0 0.3/0.4 1' line 2: the share from 0.4 to 1 leaves a gap"):
        read_shares("0 0.3/0.4 1", 2)
    with pytest.raises(UsageError, match=r"^--data-allocator 1 needs the file 2\.5/shares"):
        read_shares("2.5/shares", 2)
