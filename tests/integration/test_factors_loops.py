"""Factors with hooks, patched layers, checkpoints and transforms: the weights are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_loops import Batch, assert_close, assert_same_bits, on_one_worker, seeded
from test_factors import Wide, batches, plain, sgd, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import echelon
import tolerances
from echelon.kvstore import KVStore

pytestmark = pytest.mark.numeric

Loss = Callable[[Wide, Batch], Tensor]
Trainer = echelon.Trainer


def of_logits(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits, batch[1])


def of_hidden(model: Wide, hidden: Tensor, batch: Batch) -> Tensor:
    return of_logits(model.small(torch.relu(hidden)), batch)


def infer_batch_size(model: Wide, batch: Batch) -> None:
    """Run a forward pass of the whole model, from which the Trainer infers the batch size. It has no backward pass."""
    model(batch[0])


# --- hooks


def hooked(register: Callable[[Wide], RemovableHandle]) -> Loss:
    def loss(model: Wide, batch: Batch) -> Tensor:
        hook = register(model)
        logits = model(batch[0])
        hook.remove()
        return of_logits(logits, batch)

    return loss


other_outputs = hooked(lambda model: model.large.register_forward_hook(lambda _, args, out: 2 * out, prepend=True))
other_inputs = hooked(lambda model: model.large.register_forward_pre_hook(lambda _, args: (2 * args[0],)))


def hook_on_the_outputs(model: Wide, batch: Batch) -> Tensor:
    infer_batch_size(model, batch)
    hidden = model.large(batch[0])
    hidden.register_hook(lambda gradient: -gradient)
    return of_hidden(model, hidden, batch)


def penalty_in_a_hook(model: Wide, batch: Batch) -> Tensor:
    found: list[Tensor] = []
    hook = model.large.register_forward_pre_hook(lambda layer, _: found.append(layer.get_parameter("weight").norm()))
    logits = model(batch[0])
    hook.remove()
    return of_logits(logits, batch) + 0.1 * found[0]


# --- other uses of the layer


def changed_outputs(model: Wide, batch: Batch) -> Tensor:
    """Change the outputs in place, with inputs of three dimensions."""
    infer_batch_size(model, batch)
    hidden = model.large(batch[0].view(2, 3, -1))
    hidden[:, :, :10] = 0
    hidden.relu_()
    return of_hidden(model, hidden.flatten(0, 1), batch)


def patched(model: Wide, batch: Batch) -> Tensor:
    """Replace `forward`, as adapters around a layer do."""
    infer_batch_size(model, batch)
    forward = model.large.forward
    model.large.__dict__["forward"] = lambda inputs: 2 * forward(inputs)
    logits = model(batch[0])
    model.large.__dict__["forward"] = forward
    return of_logits(logits, batch)


def computed_again(model: Wide, batch: Batch) -> Tensor:
    infer_batch_size(model, batch)
    hidden: Tensor = checkpoint(model.large, batch[0], use_reentrant=False)
    return of_hidden(model, hidden, batch)


def of_other_weights(model: Wide, batch: Batch) -> Tensor:
    infer_batch_size(model, batch)
    weights = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return of_logits(torch.func.functional_call(model, weights, (batch[0],)), batch)


def beside_transforms(model: Wide, batch: Batch) -> Tensor:
    infer_batch_size(model, batch)
    slopes: Tensor = torch.func.jacrev(model)(batch[0][:1])
    return of_logits(model(batch[0] + 0 * slopes.sum()), batch)


# --- other backward passes


def backward(model: Wide, loss: Tensor) -> None:
    loss.backward()


def of_matrices(model: Wide, loss: Tensor) -> None:
    loss.backward(inputs=[p for p in model.parameters() if p.ndim == 2])


def of_vectors(model: Wide, loss: Tensor) -> None:
    loss.backward(inputs=[p for p in model.parameters() if p.ndim == 1])


def by_hand(model: Wide, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        parameter.grad = gradient


def masked(model: Wide, loss: Tensor) -> None:
    hook = model.large.weight.register_hook(lambda gradient: gradient * (gradient > 0))
    loss.backward()
    hook.remove()


def frozen(model: Wide, loss: Tensor) -> None:
    """Freeze the weights after the forward pass."""
    model.large.weight.requires_grad_(False)
    loss.backward()
    model.large.weight.requires_grad_(True)


def ordinary(model: Wide, batch: Batch) -> Tensor:
    return of_logits(model(batch[0]), batch)


FORWARD = [
    other_outputs,
    other_inputs,
    hook_on_the_outputs,
    penalty_in_a_hook,
    changed_outputs,
    patched,
    computed_again,
    of_other_weights,
    beside_transforms,
]


@pytest.mark.parametrize(
    ("loss", "back"),
    [(loss, backward) for loss in FORWARD]
    + [(ordinary, back) for back in (of_matrices, of_vectors, by_hand, masked, frozen)],
)
def test_weights_are_those_of_plain_pytorch(loss: Loss, back: Callable[[Wide, Tensor], None]) -> None:
    def step(model: nn.Module, trainer: Trainer | None, batch: Batch) -> None:
        assert isinstance(model, Wide)
        back(model, loss(model, batch))

    model, data = seeded(Wide), batches(2)
    found, _ = on_one_worker(lambda kv: trained(kv, model, sgd, data, step), "dist_sync")
    assert_same_bits(found, plain(model, sgd, data, step))


def test_a_weight_that_is_used_elsewhere_gets_both_gradients() -> None:
    def step(model: nn.Module, trainer: Trainer | None, batch: Batch) -> None:
        assert isinstance(model, Wide)
        (ordinary(model, batch) + 0.1 * nn.functional.linear(batch[0], model.large.weight).square().mean()).backward()

    model, data = seeded(Wide), batches(2)
    found, factored = on_one_worker(lambda kv: trained(kv, model, sgd, data, step), "dist_sync")
    assert factored == [False, False]
    expected = plain(model, sgd, data, step)  # the two gradients are added in another order
    assert_close(found, expected, tolerances.of_training(data))


def test_a_wrapper_around_a_layer_stays_after_training() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Wide)
        assert isinstance(model, Wide)
        with Trainer(model, sgd(model), kv, push_factors=True) as trainer:
            forward = model.large.forward
            wrapper = model.large.__dict__["forward"] = lambda inputs: 2 * forward(inputs)
            ordinary(model, batch).backward()
            trainer.step()
            late = ordinary(model, batch)
        assert model.large.forward is wrapper
        for loss in (late, ordinary(model, batch)):
            model.large.weight.grad = None
            loss.backward()
            assert model.large.weight.grad is not None

    batch = batches(1)[0]
    on_one_worker(program, "dist_sync")
