"""Which keys have the same clock when a worker joins: those that workers push in the same step."""

from __future__ import annotations

from echelon.kvstore.servers.waiting import pushed_seldom

FIRST, SECOND, BOTH = 1, 2, 3  # keys of the first server, of the second one, and of both


def test_servers_whose_answers_are_of_different_moments_do_not_divide_the_keys_of_a_step() -> None:
    """A worker with clock 2023 has joined the second server, and not yet the first one. This worker has waited."""
    answers = [{FIRST: 2015, BOTH: 2015}, {SECOND: 2023, BOTH: 2023}]
    own = dict.fromkeys((FIRST, SECOND, BOTH), 2015)
    assert pushed_seldom(answers, own, lock_step=False) == set()
    assert pushed_seldom(answers, {}, lock_step=False) == set(), "a new worker"
    assert pushed_seldom(answers, dict.fromkeys(own, 0), lock_step=False) == set(), "a new worker with keys"


def test_a_worker_knows_from_its_own_clocks_what_it_pushes_seldom() -> None:
    own = {FIRST: 100, SECOND: 3, BOTH: 100}
    assert pushed_seldom([{FIRST: 100, BOTH: 100}, {SECOND: 3, BOTH: 100}], own, lock_step=True) == {SECOND}
    assert pushed_seldom([{FIRST: 100, BOTH: 100}, {SECOND: 99, BOTH: 99}], own, lock_step=False) == {SECOND}


def test_a_new_worker_learns_from_each_server_what_the_others_push_seldom() -> None:
    answers = [{FIRST: 7, BOTH: 200}, {BOTH: 200}]
    assert pushed_seldom(answers, {}, lock_step=False) == {FIRST}
    assert pushed_seldom(answers, {FIRST: 0, BOTH: 0}, lock_step=False) == {FIRST}


def test_in_lock_step_a_new_worker_compares_servers() -> None:
    assert pushed_seldom([{FIRST: 7}, {SECOND: 200}], {}, lock_step=True) == {FIRST}
    assert pushed_seldom([{FIRST: 198}, {SECOND: 200}], {}, lock_step=True) == set()
    assert pushed_seldom([], {}, lock_step=True) == set()
