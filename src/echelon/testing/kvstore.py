"""The conformance suite of stores: MXNet's acceptance values, and the guarantees that Echelon adds.

`check_kvstore(run, store, num_workers=3)` takes a function like `launch.threads.in_process.run` and passes it the
options that the scheme needs (staleness, groups). Every check runs a job of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.testing import kvstore_calls as calls
from echelon.testing import kvstore_exchange as exchange
from echelon.testing import kvstore_rows as rows
from echelon.testing import kvstore_updates as updates
from echelon.testing import kvstore_values as values
from echelon.testing.trial import Run, Trial

Check = Callable[[Trial], None]


def check_kvstore(run: Run, store: str, *, num_workers: int = 3, num_servers: int = 2, **options: Any) -> None:
    """Run every check on jobs that `run` starts."""
    trial = Trial(run, store, num_workers, num_servers, options)
    for check in CHECKS:
        check(trial)


CHECKS: tuple[Check, ...] = (
    calls.each_worker_has_its_rank,
    calls.pull_before_push_returns_the_initial_value,
    calls.push_replaces_the_value_with_the_sum,
    calls.values_of_several_devices_are_summed,
    calls.pushpull_writes_in_place_or_to_out,
    calls.broadcast_sends_the_values_of_rank_0,
    calls.keys_of_one_call_may_have_different_clocks,
    calls.a_key_named_twice_is_pushed_once_with_the_sum,
    calls.barrier_waits_for_all_workers,
    calls.a_rejected_call_changes_nothing,
    updates.updates_add_up_over_rounds,
    updates.pushes_without_pulls_are_separate_updates,
    updates.optimizers_match_torch,
    updates.optimizer_states_can_be_saved_and_loaded,
    updates.workers_wait_only_as_the_scheme_requires,
    exchange.gather_returns_the_values_of_all_workers,
    exchange.all_reduce_returns_the_same_on_all_workers,
    exchange.values_that_cannot_be_exchanged_are_rejected,
    rows.sparse_pushes_are_summed_by_row,
    rows.rows_can_be_pulled_by_number,
    rows.a_sparse_push_replaces_the_value,
    rows.rows_are_updated_as_torch_does,
    values.every_dtype_is_preserved,
    values.other_dtypes_are_cast,
    values.half_precision_is_summed_in_float32,
    values.any_shape_is_accepted,
    values.values_need_not_be_contiguous,
    values.large_and_small_keys_are_summed_in_rank_order,
)
