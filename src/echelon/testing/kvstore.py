"""What a KVStore promises, checked on any store: MXNet's acceptance values, and what Echelon adds to them.

`check_kvstore(run, store, num_workers=3)` takes a function like `echelon.launch.in_process.run`. Options that the
scheme needs (staleness, groups) are handed on. Every check is a job of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.testing import kvstore_calls as calls
from echelon.testing import kvstore_updates as updates
from echelon.testing import kvstore_values as values
from echelon.testing.trial import Run, Trial

Check = Callable[[Trial], None]


def check_kvstore(run: Run, store: str, *, num_workers: int = 3, num_servers: int = 2, **options: Any) -> None:
    """Run every check on jobs that `run` makes."""
    trial = Trial(run, store, num_workers, num_servers, options)
    for check in CHECKS:
        check(trial)


CHECKS: tuple[Check, ...] = (
    calls.workers_know_who_they_are,
    calls.pull_before_push_gives_the_first_value,
    calls.push_replaces_by_the_sum,
    calls.values_of_several_devices_are_summed,
    calls.pushpull_writes_in_place_or_out,
    calls.broadcast_gives_everybody_the_first_workers_values,
    calls.keys_of_one_call_may_have_different_clocks,
    calls.barrier_holds_until_all_are_there,
    calls.a_refused_call_changes_nothing,
    updates.rounds_add_up,
    updates.pushes_need_no_pull_between,
    updates.optimizers_do_what_torch_does,
    updates.states_can_be_saved_and_loaded,
    updates.workers_wait_as_the_scheme_says,
    values.every_dtype_is_kept,
    values.half_precision_is_summed_in_full,
    values.any_shape_will_do,
    values.values_need_not_be_contiguous,
    values.big_and_tiny_keys_are_summed_bit_by_bit,
)
