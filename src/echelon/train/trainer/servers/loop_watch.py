"""What a loop does between backward and step: it decides whether gradients may be sent early, and what is refused.

Two things would go wrong silently. A change of something that was already sent has no effect. And a change of one
worker's gradient, where servers sum the gradients of several, is not a change of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import UsageError
from echelon.train.trainer.servers.gradients import WatchedGradient, Write
from echelon.train.trainer.servers.overlap import Overlap, Settings, changed_setting, settings_of
from echelon.train.trainer.servers.weights import ModelWeights, Snapshot

_ASSIGNMENT = Write("an assignment", ())


class LoopWatch:
    """Watches one step after the other.

    `summed()` returns the number of workers whose gradients servers sum before they update, `store` the store's name.
    With `allow_edits` a worker may change its own part of such a sum.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: ModelWeights,
        overlap: Overlap,
        summed: Callable[[], int],
        store: str,
        *,
        allow_edits: bool,
    ) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._overlap = overlap
        self._summed = summed
        self._store = store
        self._allow_edits = allow_edits
        self._sent: set[str] = set()  # parameters whose gradients of this step were sent during backward
        self._seen: dict[str, WatchedGradient] = {}  # gradients of this step that are sent in `step`
        self._settings: Settings | None = None  # at the first gradient of the step
        self._snapshot: Snapshot | None = None  # of the weights, at that point

    # --- during backward

    def begin_sending(self) -> bool:
        """Note the settings at the first push of a step. Return whether it is the first."""
        is_first = self._settings is None
        if is_first:
            self._settings = settings_of(self._optimizer)
        return is_first

    def note_weights(self) -> None:
        """Note the weights that the gradients of this step belong to."""
        self._snapshot = self._weights.snapshot()

    def send(self, name: str, gradient: Tensor) -> WatchedGradient:
        """Return a gradient that is being sent as one that refuses writes until the step ends."""
        self._sent.add(name)
        return WatchedGradient.of(gradient, partial(self._before_write, name))

    def see(self, name: str, parameter: Tensor) -> None:
        """Watch a gradient that will be sent in `step`."""
        gradient = parameter.grad
        assert gradient is not None
        if self.begin_sending() and self._overlap.is_open:
            self.note_weights()
        if name in self._seen:
            self._overlap.rule_out("runs backward several times for one step")
        if gradient is self._seen.get(name):
            return
        if (self._overlap.is_open or self._summed() > 1) and not (gradient.is_sparse or gradient.requires_grad):
            watched = WatchedGradient.of(gradient, partial(self._before_write, name))
            self._seen[name] = parameter.grad = watched

    def discard(self, name: str) -> None:
        """Forget a gradient that is discarded."""
        self._seen.pop(name, None)
        self._sent.discard(name)

    # --- at the step

    def observe(self, parameters: Mapping[str, nn.Parameter], samples_seen: int | None, samples: int) -> None:
        """Note what the loop did since backward, if nothing was sent yet."""
        for name, watched in self._seen.items():
            if (gradient := parameters[name].grad) is not watched and gradient is not None:
                self._before_write(name, _ASSIGNMENT)
        if samples_seen not in (None, samples):
            self._overlap.rule_out("passes another batch size to step() than the forward pass saw")
        if change := self._changed_setting():
            self._overlap.rule_out(f"changes settings between backward() and step() ({change})")
        if self._weights_changed():
            self._overlap.rule_out("changes weights between backward() and step()")

    def check_unchanged(self, replaced: list[str], *, tables_edited: bool) -> None:
        """Raise UsageError if the loop has changed something after gradients were sent with it.

        `replaced`: parameters that got another gradient. `tables_edited`: tables of embeddings were changed.
        """
        for name in replaced:
            self._before_write(name, _ASSIGNMENT)
        if change := self._changed_setting():
            raise UsageError(
                f"the optimizer's {change} between backward() and step(), after gradients were sent; change it before "
                "backward(), or pass Trainer(overlap=False)"
            )
        if self._weights_changed() or tables_edited:
            raise UsageError(
                "weights were changed between backward() and step(), after gradients were sent; change them after "
                "step(), or pass Trainer(overlap=False)"
            )

    def check_not_in_place_of_steps(self, num_workers: int, *, lock_step: bool) -> None:
        """Raise UsageError if the loop has changed weights by hand. Call it at the end, if there was no step."""
        if self._settings is None or not self._weights.edited():
            return  # without settings, there was no backward pass
        by_hand = "; to update weights by hand, pass Trainer(update_on_kvstore=False), which averages the gradients"
        raise UsageError(
            "the loop ran backward and changed weights, but called neither trainer.step() nor optimizer.step(), so the "
            f"{num_workers} workers did not train together; call step() in place of the change"
            + (by_hand if lock_step else "")
        )

    def end_step(self) -> None:
        """Decide about overlap if that is open, and begin a new step."""
        self._overlap.decide()
        self._settings = self._snapshot = None
        self._seen.clear()
        self._sent.clear()

    def _changed_setting(self) -> str | None:
        return None if self._settings is None else changed_setting(self._settings, settings_of(self._optimizer))

    def _weights_changed(self) -> bool:
        return self._snapshot is not None and not self._snapshot.same_as(self._weights.snapshot())

    def _before_write(self, name: str, write: Write) -> None:
        """Raise UsageError if the loop may not change a gradient now."""
        if name in self._sent:
            raise UsageError(
                f"{write.name} would change the gradient of {name!r}, which was sent during backward; to clip by norm, "
                "pass Trainer(max_grad_norm=…); to change gradients in other ways, pass Trainer(overlap=False)"
            )
        if name not in self._seen or write.is_zeroing:
            return
        self._overlap.rule_out("changes gradients between backward() and step()")
        summed = self._summed()
        if summed > 1 and not (write.is_scaling or self._allow_edits):
            raise UsageError(
                f"{write.name} would change this worker's gradient of {name!r}, but not the sum over all {summed} "
                f"workers that {self._store} updates with. To clip by norm, pass Trainer(max_grad_norm=…) in place of "
                "clip_grad_norm_; to change each worker's own gradient, pass Trainer(local_gradient_edits=True)"
            )
