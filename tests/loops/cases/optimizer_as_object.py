"""Loops that use their optimizer as PyTorch's documentation describes it: its state, its hooks, its groups."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import StepLR

from loops.loop import Result, Run, loop, refused
from loops.models import begin, mlp, momentum, step

EDIT = refused("trainer.edit_weights()")


@loop("optimizer.state_dict() after training has the state of Adam")
def state_dict_of_adam(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, optimizer.state_dict()


@loop("optimizer.state_dict() after every step")
def state_dict_each_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    states = []
    for loss in run.losses(net):
        step(loss, optimizer)
        states.append(copy.deepcopy(optimizer.state_dict()))
    return model, states


@loop("optimizer.load_state_dict() in the middle of training")
def loads_optimizer_state(run: Run) -> Result:
    model, optimizer, net = begin(run)
    saved: dict[str, Any] = {}
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 1:
            saved = copy.deepcopy(optimizer.state_dict())
        if number == 3:
            optimizer.load_state_dict(saved)
    return model, optimizer


ON_SERVERS = refused("optimizer.state_dict()['state'] has it")


@loop("reads optimizer.state[parameter] after a step", one=ON_SERVERS, sync=ON_SERVERS, relaxed=ON_SERVERS)
def reads_state(run: Run) -> Result:
    model, optimizer, net = begin(run)
    norms = []
    for loss in run.losses(net):
        step(loss, optimizer)
        norms.append([optimizer.state[p]["momentum_buffer"].norm() for p in model.parameters()])
    return model, norms


@loop("register_step_pre_hook and register_step_post_hook")
def step_hooks(run: Run) -> Result:
    model, optimizer, net = begin(run)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1.0))
    optimizer.register_step_post_hook(lambda *_: calls.append(float(next(model.parameters()).detach().sum())))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, calls


@loop("a scheduler that is made before the Trainer, and one that is made after it")
def schedulers_around(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    before = StepLR(optimizer, 2, gamma=0.5)
    net = run.attach(model, optimizer)
    after = StepLR(optimizer, 3, gamma=0.5)
    for loss in run.losses(net):
        step(loss, optimizer)
        before.step()
        after.step()
    return model, optimizer


@loop("groups of parameters with learning rates of their own")
def groups(run: Run) -> Result:
    model = mlp()
    first, _, last = model.children()
    optimizer = SGD(
        [{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters(), "weight_decay": 0.1}],
        lr=0.1,
        momentum=0.9,
    )
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, optimizer


@loop("no weight decay for biases (two groups, as GPT does)")
def no_decay_for_biases(run: Run) -> Result:
    model = mlp()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    optimizer = Adam(groups, lr=0.01)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, optimizer


@loop("an optimizer that has made steps before the Trainer exists")
def used_before(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    for inputs, targets in run.batches(2):
        step(mse_loss(model(inputs * 0 + 1), targets * 0), optimizer)  # the same on all workers
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, optimizer


@loop("an optimizer for some parameters of the model; the others do not change")
def some_parameters(run: Run) -> Result:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = momentum(model[2])
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


NO_LBFGS = refused("LBFGS cannot run on the servers")


@loop(
    "LBFGS, which calls its closure several times",
    one=NO_LBFGS,
    sync=NO_LBFGS,
    collective=refused("train in one process (kvstore='local')"),
    relaxed=NO_LBFGS,
)
def lbfgs(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=lambda model: LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for inputs, targets in run.batches():

        def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            loss = mse_loss(net(inputs), targets)
            loss.backward()
            run.record(loss)
            return loss

        optimizer.step(closure)
    return model
