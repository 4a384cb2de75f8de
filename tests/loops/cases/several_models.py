"""Loops with several models or several optimizers, each with a Trainer of its own."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_embedding_loss, mse_loss
from torch.optim import SGD, Adam

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, Result, Run, loop, refused
from loops.models import WIDTH, begin, mlp, momentum, step

EDIT = refused("trainer.edit_weights()")
NEW_GROUP = refused("create another one after add_param_group")


def scorer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(TARGETS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


@loop("a GAN: generator and discriminator, each with its optimizer (DCGAN)", learns=False)
def gan(run: Run) -> Result:
    generator, of_generator, generate = begin(run)
    discriminator, of_discriminator, judge = begin(run, scorer())
    for noise, real in run.batches():
        of_discriminator.zero_grad()
        fake = generate(noise)
        on_real = binary_cross_entropy_with_logits(judge(real), torch.ones(len(real), 1))
        on_fake = binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(len(real), 1))
        (on_real + on_fake).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss = binary_cross_entropy_with_logits(judge(fake), torch.ones(len(real), 1))
        run.record(loss)
        loss.backward()
        of_generator.step()
    return generator, discriminator


@loop("a WGAN: two critic steps per generator step, critic clamped", learns=False, relaxed=EDIT)
def wgan(run: Run) -> Result:
    generator, of_generator, generate = begin(run)
    critic, of_critic, judge = begin(run, scorer())
    for number, (noise, real) in enumerate(run.batches()):
        of_critic.zero_grad()
        loss = judge(generate(noise).detach()).mean() - judge(real).mean()
        run.record(loss)
        loss.backward()
        of_critic.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        if number % 2:
            of_generator.zero_grad()
            (-judge(generate(noise)).mean()).backward()
            of_generator.step()
    return generator, critic


class Policy(nn.Module):
    """An actor and a critic on one trunk (PyTorch's actor-critic example)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, WIDTH)
        self.actor = nn.Linear(WIDTH, TARGETS)
        self.critic = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        return torch.softmax(self.actor(hidden), -1), self.critic(hidden)


@loop("actor-critic with one model: forward passes for single observations", learns=False)
def actor_critic(run: Run) -> Result:
    model, optimizer, net = begin(run, Policy(), optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for observations, rewards in run.batches():
        probabilities, values = net(observations)
        chosen = Categorical(probabilities)
        action = rewards.argmax(1)
        advantage = rewards.max(1).values - values.squeeze(1)
        loss = (-chosen.log_prob(action) * advantage.detach() + advantage.square()).mean()
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("actor and critic as two models with two optimizers", learns=False)
def two_models(run: Run) -> Result:
    actor, of_actor, act = begin(run)
    critic, of_critic, judge = begin(run, nn.Linear(FEATURES, TARGETS))
    for observations, rewards in run.batches():
        values = judge(observations)
        loss = mse_loss(values, rewards)
        run.record(loss)
        step(loss, of_critic)
        step(-(torch.log_softmax(act(observations), 1) * (rewards - values.detach())).mean(), of_actor)
    return actor, critic


@loop("DQN: a target network that gets the weights every few steps", reads_weights=True)
def dqn_hard(run: Run) -> Result:
    model, optimizer, net = begin(run)
    target = copy.deepcopy(model)
    for number, (inputs, rewards) in enumerate(run.batches()):
        with torch.no_grad():
            goal = rewards + 0.5 * target(inputs).max(1, keepdim=True).values
        loss = mse_loss(net(inputs), goal)
        run.record(loss)
        step(loss, optimizer)
        if number % 3 == 2:
            target.load_state_dict(model.state_dict())
    return model, target


@loop("DDPG, BYOL: a target network that follows slowly", reads_weights=True)
def soft_target(run: Run) -> Result:
    model, optimizer, net = begin(run)
    target = copy.deepcopy(model)
    for inputs, rewards in run.batches():
        with torch.no_grad():
            goal = rewards + 0.1 * target(inputs)
        loss = mse_loss(net(inputs), goal)
        run.record(loss)
        step(loss, optimizer)
        with torch.no_grad():
            for slow, p in zip(target.parameters(), model.parameters(), strict=True):
                slow.mul_(0.8).add_(p, alpha=0.2)
    return model, target


@loop("a siamese network: two forward passes of one model per step")
def siamese(run: Run) -> Result:
    model, optimizer, net = begin(run, ddp={"find_unused_parameters": False})

    for inputs, _ in run.batches():
        both = net(torch.cat([inputs, inputs.flip(1)]))
        left, right = both.chunk(2)
        loss = cosine_embedding_loss(left, right, torch.ones(len(left)))
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("calls the model twice per step, with one batch each", reference=ALONE)
def two_calls(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs), targets) + mse_loss(net(inputs * 0.5), targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("MAML: inner steps on copies of the weights, outer step on the model", reference=ALONE)
def maml(run: Run) -> Result:
    model, optimizer, _ = begin(run)
    for inputs, targets in run.batches():
        weights: dict[str, Tensor] = dict(model.named_parameters())
        inner = mse_loss(torch.func.functional_call(model, weights, (inputs * 0 + 1,)), targets * 0)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), slopes, strict=True)}
        loss = mse_loss(torch.func.functional_call(model, adapted, (inputs,)), targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("one optimizer for two models (itertools.chain of their parameters)")
def one_optimizer(run: Run) -> Result:
    encoder, decoder = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, TARGETS)
    both = nn.Sequential(encoder, decoder)
    optimizer = SGD(itertools.chain(encoder.parameters(), decoder.parameters()), lr=0.05)
    net = run.attach(both, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return encoder, decoder


@loop("two optimizers for two parts of one model, a Trainer for each", reference=ALONE)
def two_optimizers(run: Run) -> Result:
    model = mlp()
    first, _, last = model.children()
    slow, fast = SGD(first.parameters(), lr=0.01), Adam(last.parameters(), lr=0.01)
    run.attach(model, slow)
    net = run.attach(model, fast)
    for loss in run.losses(net):
        slow.zero_grad()
        fast.zero_grad()
        loss.backward()
        slow.step()
        fast.step()
    return model


@loop("a Trainer for a part of the model; the rest is frozen")
def part_of_model(run: Run) -> Result:
    backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh()).requires_grad_(False)
    head, optimizer, net = begin(run, nn.Linear(WIDTH, TARGETS))
    for inputs, targets in run.batches():
        loss = mse_loss(net(backbone(inputs)), targets)
        run.record(loss)
        step(loss, optimizer)
    return head


@loop("k-fold: a model, an optimizer and a Trainer after another", learns=False)
def k_fold(run: Run) -> Result:
    results = []
    for fold in range(3):
        torch.manual_seed(fold)
        model, optimizer, net = begin(run)
        for loss in run.losses(net, steps=run.steps // 2):
            step(loss, optimizer)
        if run.trainer is not None:
            run.trainer.close()
        results.append(model)
    return results


@loop("a second optimizer and Trainer for the same model, after the first was closed (fine-tuning)")
def fine_tunes(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net, steps=run.steps // 2):
        step(loss, optimizer)
    if run.trainer is not None:
        run.trainer.close()
    second = Adam(model.parameters(), lr=0.001)
    net = run.attach(model, second)
    for loss in run.losses(net, steps=run.steps // 2):
        step(loss, second)
    return model


@loop("distillation: a frozen teacher without a Trainer")
def teacher(run: Run) -> Result:
    master = mlp().requires_grad_(False)
    model, optimizer, net = begin(run)
    for inputs, _ in run.batches():
        loss = mse_loss(net(inputs), master(inputs))
        run.record(loss)
        step(loss, optimizer)
    return model


@loop(
    "add_param_group() for parameters that the model had from the start",
    reference=ALONE,
    one=NEW_GROUP,
    sync=NEW_GROUP,
    relaxed=NEW_GROUP,
)
def adds_group(run: Run) -> Result:
    model = mlp()
    first, _, last = model.children()
    optimizer = momentum(last)
    net = run.attach(model, optimizer)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        model.zero_grad()
        if number == 1:
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})
    return model, optimizer


@loop("adds a layer and add_param_group() for it", reference=ALONE, one=NEW_GROUP, sync=NEW_GROUP, relaxed=NEW_GROUP)
def adds_layer(run: Run) -> Result:
    model, optimizer, net = begin(run, nn.Sequential(nn.Linear(FEATURES, TARGETS)))
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 1:
            assert isinstance(model, nn.Sequential)
            model.append(nn.Linear(TARGETS, TARGETS))
            optimizer.add_param_group({"params": list(model[1].parameters())})
    return model, optimizer
