"""Storage: weighted sums, calls of the kernel, and copies to outputs, without processes or sockets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from echelon.cluster.placement import ALIGN, KeySpec, Layout, Piece
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.kernels import kernel_for
from echelon.server.storage.execute import CHUNK, Storage, Task, Update, WeightedGradient
from echelon.server.storage.factored import Factored
from echelon.server.storage.memory import FRAME_ELEMENTS, Mapped, Window, empty_frames, frame_pieces

pytestmark = pytest.mark.numeric

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


class Recorder(Kernel):
    """Subtracts the scaled gradient and records the calls."""

    def __init__(
        self, *, exact: bool = False, whole: bool = False, scales: bool = False, names: Sequence[str] = ()
    ) -> None:
        super().__init__({"fused": exact})
        self.whole = whole
        self.scales_gradient = scales
        self._names = tuple(names)
        self.lengths: list[int] = []
        self.scales: list[float] = []
        self.places: list[int] = []

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._names

    def update(self, weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Step) -> None:
        self.lengths.append(len(weights))
        self.scales.append(step.scale)
        self.places.append(gradient.data_ptr())
        weights.sub_(gradient, alpha=step.scale)
        for state in states:
            state.add_(1)


class Keys:
    """Keys in one segment, on one or more servers."""

    def __init__(self, *lengths: int, dtype: str = "float32", num_servers: int = 1) -> None:
        self.layout = Layout(num_servers)
        self.slots = self.layout.place([KeySpec(name, (length,), dtype) for name, length in enumerate(lengths)])
        (self.segment,) = self.layout.segments
        self.used = self.slots[-1].start + self.slots[-1].padded
        self.dtype = getattr(torch, dtype)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(slot.key for slot in self.slots)

    def storage(self, server: int = 0) -> Storage:
        return Storage(self.layout, server)

    def window(self, seed: int | None = None) -> Mapped:
        """A worker's memory: zeros, or small whole numbers, whose sums are exact."""
        memory = torch.zeros(self.used, dtype=self.dtype)
        if seed is not None:
            random = torch.randint(-8, 9, (self.used,), generator=torch.Generator().manual_seed(seed))
            memory.copy_(random)
        mapped = Mapped()
        mapped.segments[0] = memory
        return mapped

    def values(self, window: Window, key: int = 0) -> Tensor:
        slot = self.slots[key]
        return window.view(0, slot.start, slot.start + slot.length).clone()

    def framed(self, window: Mapped | None = None) -> Window:
        """Frames of all keys, with the values of a window."""
        pieces = frame_pieces([piece for slot in self.slots for piece in self.layout.pieces(slot, 0)])
        frames = empty_frames(pieces, [self.segment.dtype])
        for piece in pieces:
            source = window.view(*piece[:3]) if window is not None else torch.tensor(0.0)
            frames.view(*piece[:3]).copy_(source)
        return frames


def update(*gradients: tuple[Window, float], kernel: Kernel | None = None) -> Update:
    return Update(tuple(WeightedGradient(*gradient) for gradient in gradients), kernel, Step(Progress(), 0.1))


def replaced(storage: Storage, keys: Keys, *gradients: tuple[Window, float]) -> Mapped:
    """The weights after the weighted sum has replaced them."""
    output = keys.window()
    storage.run([Task(keys.numbers, update(*gradients), (output,))])
    return output


# --- sums


@pytest.mark.parametrize("weights", [(1.0,), (0.5,), (1.0, 1.0, 1.0), (0.25, 0.25), (0.5, 0.25, 0.25)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_without_a_kernel_the_weighted_sum_replaces_the_weights(weights: tuple[float, ...], dtype: str) -> None:
    if dtype == "int64":
        weights = tuple(1.0 for _ in weights)
    keys = Keys(70, 300, dtype=dtype)
    windows = [keys.window(seed) for seed in range(len(weights))]
    output = replaced(keys.storage(), keys, *zip(windows, weights, strict=True))
    for key in range(2):
        parts = [keys.values(window, key).double() * weight for window, weight in zip(windows, weights, strict=True)]
        assert torch.equal(keys.values(output, key).double(), sum(parts, torch.zeros(1).double()))


def test_half_precision_is_summed_in_float32() -> None:
    keys = Keys(64, dtype="float16")
    large, small = keys.window(), keys.window()
    large.segments[0][:64] = 2048.0
    small.segments[0][:64] = 1.0
    storage = keys.storage()
    replaced(storage, keys, (large, 1.0), (small, 1.0), (small, 1.0))
    (piece,) = keys.layout.pieces(keys.slots[0], 0)
    assert set(storage.weights(piece).tolist()) == {2050.0}  # float16 has no 2049: it would stay at 2048


def test_the_sum_is_taken_in_the_given_order() -> None:
    keys = Keys(64)
    windows = []
    for value in (1e8, 1.0, -1e8):
        windows.append(keys.window())
        windows[-1].segments[0][:64] = value
    one, two, three = ((window, 1.0) for window in windows)
    assert set(keys.values(replaced(keys.storage(), keys, one, two, three)).tolist()) == {0.0}
    assert set(keys.values(replaced(keys.storage(), keys, one, three, two)).tolist()) == {1.0}


def test_factors_are_multiplied_and_summed_with_other_gradients() -> None:
    layout = Layout(1)
    (slot,) = layout.place([KeySpec("weight", (8, 12), "float32")])
    left, right = torch.arange(8.0), torch.arange(12.0)
    factored = Factored(slot, 1, torch.cat([left, right]))
    plain = Mapped()
    plain.segments[0] = torch.ones(slot.padded)
    product = torch.outer(left, right).view(-1)
    cases: list[tuple[list[tuple[Window, float]], Tensor]] = [
        ([(factored, 1.0)], product),
        ([(factored, 0.5), (factored, 0.5)], product),
        ([(factored, 1.0), (plain, 2.0)], product + 2),
    ]
    for gradients, expected in cases:
        output = Mapped()
        output.segments[0] = torch.zeros_like(plain.segments[0])
        Storage(layout, 0).run([Task((0,), update(*gradients), (output,))])
        assert torch.equal(output.segments[0][:96], expected)


# --- kernels


def test_a_single_gradient_of_weight_1_is_not_copied() -> None:
    keys = Keys(64)
    gradient, kernel = keys.window(1), Recorder()
    keys.storage().run([Task((0,), update((gradient, 1.0), kernel=kernel), ())])
    assert kernel.places == [gradient.segments[0].data_ptr()]
    before = keys.values(gradient)
    keys.storage().run([Task((0,), update((gradient, 0.5), kernel=kernel), ())])
    assert kernel.places[1] != kernel.places[0]
    assert torch.equal(keys.values(gradient), before)


@pytest.mark.parametrize("scales", [False, True])
def test_only_a_kernel_that_scales_gets_the_scale(scales: bool) -> None:
    keys = Keys(64)
    one, two, kernel, output = keys.window(1), keys.window(2), Recorder(scales=scales), keys.window()
    keys.storage().run([Task((0,), update((one, 0.5), (two, 0.5), kernel=kernel), (output,))])
    assert kernel.scales == [0.5 if scales else 1.0]
    assert torch.equal(keys.values(output), -(keys.values(one) + keys.values(two)) / 2)


def test_neighbouring_keys_are_one_run_and_long_runs_are_cut_into_chunks() -> None:
    keys = Keys(*[1000] * 300)
    kernel, output = Recorder(), keys.window()
    gradient = keys.window(3)
    tasks = [Task((key,), update((gradient, 1.0), kernel=kernel), (output,)) for key in keys.numbers]
    keys.storage().run(tasks)
    assert kernel.lengths == [CHUNK, CHUNK, keys.used - 2 * CHUNK]
    assert torch.equal(output.segments[0][: keys.used], -gradient.segments[0][: keys.used])


def test_tasks_with_different_outputs_are_separate_runs() -> None:
    keys = Keys(64, 64)
    gradient, kernel, output = keys.window(3), Recorder(), keys.window()
    same = update((gradient, 1.0), kernel=kernel)
    keys.storage().run([Task((0,), same, (output,)), Task((1,), same, ())])
    assert kernel.lengths == [64, 64]
    assert torch.equal(keys.values(output), -keys.values(gradient))
    assert not keys.values(output, 1).any()


def test_an_exact_kernel_gets_pieces_that_end_with_the_key() -> None:
    keys = Keys(70, 3)
    kernel = Recorder(exact=True)
    keys.storage().run([Task((0, 1), update((keys.window(1), 1.0), kernel=kernel), ())])
    assert kernel.lengths == [70, 3]


def test_a_whole_kernel_gets_each_key_in_one_call() -> None:
    keys = Keys(CHUNK * 2 + 5, 70)
    one, two, output = keys.window(1), keys.window(2), keys.window()
    kernel = Recorder(whole=True)
    keys.storage().run([Task((0, 1), update((one, 1.0), (two, 1.0), kernel=kernel), (output,))])
    assert kernel.lengths == [CHUNK * 2 + 5, 70]
    for key in range(2):
        assert torch.equal(keys.values(output, key), -(keys.values(one, key) + keys.values(two, key)))


def test_states_start_as_zeros_and_are_kept_by_name() -> None:
    keys = Keys(64)
    storage = keys.storage()
    (piece,) = keys.layout.pieces(keys.slots[0], 0)
    for names in (("one", "two"), ("two",), ("two", "three")):
        storage.run([Task((0,), update((keys.window(1), 1.0), kernel=Recorder(names=names)), ())])
    states = storage.states(piece, ("three", "two", "one"))
    assert [set(state.tolist()) for state in states] == [{1}, {3}, {1}]


# --- pieces, frames and servers


def test_a_task_without_an_update_copies_the_weights_to_all_outputs() -> None:
    keys = Keys(CHUNK + 100, 70)
    storage, values = keys.storage(), keys.window(7)
    replaced(storage, keys, (values, 1.0))
    outputs: list[Window] = [keys.window(), keys.framed()]
    storage.run([Task(keys.numbers, None, tuple(outputs))])
    for output in outputs:
        assert all(torch.equal(keys.values(output, key), keys.values(values, key)) for key in range(2))


@pytest.mark.parametrize(("exact", "whole"), [(False, False), (True, False), (False, True)])
def test_frames_give_the_same_result_as_shared_memory(exact: bool, whole: bool) -> None:
    keys = Keys(FRAME_ELEMENTS - 64, 1000)  # the second key has a seam in it
    gradient = keys.window(5)
    outputs: list[Window] = [keys.window(), keys.framed()]
    for window, output in zip((gradient, keys.framed(gradient)), outputs, strict=True):
        keys.storage().run(
            [Task(keys.numbers, update((window, 1.0), kernel=Recorder(exact=exact, whole=whole)), (output,))]
        )
    slot = keys.slots[1]
    assert outputs[1].seams(0, slot.start, slot.start + slot.length) == [FRAME_ELEMENTS]
    parts = [Piece(0, slot.start, FRAME_ELEMENTS, 0), Piece(0, FRAME_ELEMENTS, keys.used, 0)]
    assert all(torch.equal(outputs[1].view(*part[:3]), outputs[0].view(*part[:3])) for part in parts)


@pytest.mark.parametrize("num_servers", [2, 3])
def test_servers_together_do_what_one_does(num_servers: int) -> None:
    lengths = (200_000, 70, 150_000)
    one, many = Keys(*lengths), Keys(*lengths, num_servers=num_servers)
    expected, output = one.window(), many.window()
    for keys, window in ((one, expected), (many, output)):
        for server in range(keys.layout.num_servers):
            storage = keys.storage(server)
            for seed in range(3):
                step = Update(
                    (WeightedGradient(keys.window(seed), 0.5), WeightedGradient(keys.window(9), 0.5)),
                    kernel_for("sgd", SGD),
                    Step(Progress(seed, frozenset({"momentum_buffer"}) if seed else frozenset()), 0.1),
                )
                storage.run([Task(keys.numbers, step, (window,))])
    assert torch.equal(expected.segments[0][: one.used], output.segments[0][: many.used])
    assert one.used % ALIGN == 0
