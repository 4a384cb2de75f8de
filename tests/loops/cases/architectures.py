"""Models whose forward pass is unusual: recurrent, normalised, compiled, checkpointed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, Result, Run, loop, refused
from loops.models import WIDTH, begin, mlp, step


def trains(run: Run, network: nn.Module, **options: Any) -> Result:
    """Train as most loops do."""
    model, optimizer, net = begin(run, network, **options)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("BatchNorm: each worker has statistics of its own batches")
def batch_norm(run: Run) -> Result:
    return trains(
        run, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS))
    )


@loop("LayerNorm and GELU")
def layer_norm(run: Run) -> Result:
    return trains(
        run, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, TARGETS))
    )


@loop("Dropout with a seed")
def dropout(run: Run) -> Result:
    return trains(run, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, TARGETS)))


class Recurrent(nn.Module):
    """Reads a vector as a sequence of two parts."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(FEATURES // 2, WIDTH, batch_first=True, **options)
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.rnn(inputs.unflatten(1, (2, FEATURES // 2)))[0][:, -1])
        return outputs


@loop("an LSTM, whose weights flatten_parameters() may move")
def lstm(run: Run) -> Result:
    network = Recurrent(nn.LSTM, num_layers=2)
    network.rnn.flatten_parameters()
    return trains(run, network, optimizer=lambda module: Adam(module.parameters(), lr=0.03))


@loop("a GRU with dropout between its layers")
def gru(run: Run) -> Result:
    return trains(run, Recurrent(nn.GRU, num_layers=2, dropout=0.2))


class WordModel(nn.Module):
    """A language model: batches are time-major, and the hidden state is carried from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        outputs, hidden = self.rnn(self.words(tokens), hidden)
        return self.head(outputs), hidden


@loop("truncated back-propagation: the hidden state goes from batch to batch, detached; time comes first")
def truncated(run: Run) -> Result:
    model, optimizer, net = begin(run, WordModel())
    hidden = torch.zeros(1, 8, WIDTH)
    for inputs, _ in run.batches():
        tokens = (inputs.abs() * 10).long().T % 11
        outputs, hidden = net(tokens[:-1], hidden.detach())
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), tokens[1:].flatten())
        run.record(loss)
        step(loss, optimizer)
    return model, hidden


@loop("nn.TransformerEncoder with nn.MultiheadAttention")
def transformer(run: Run) -> Result:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.last = nn.Linear(WIDTH, TARGETS)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.last(self.encoder(self.embed(inputs.unsqueeze(2))).mean(1))
            return outputs

    return trains(run, Encoder())


@loop("MultiheadAttention alone: it reads out_proj.weight without calling out_proj", reads_weights=True)
def attention(run: Run) -> Result:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
            self.last = nn.Linear(FEATURES, TARGETS)

        def forward(self, inputs: Tensor) -> Tensor:
            rows = inputs.unsqueeze(1)
            outputs: Tensor = self.last(self.attention(rows, rows, rows)[0].squeeze(1))
            return outputs

    return trains(run, Attends())


class VAE(nn.Module):
    """PyTorch's example, small."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 2 * 2)
        self.decoder = nn.Linear(2, FEATURES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


@loop("a VAE: a model with several outputs, and random numbers in its forward pass")
def vae(run: Run) -> Result:
    model, optimizer, net = begin(run, VAE())
    for inputs, _ in run.batches():
        outputs, mean, log_variance = net(inputs)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = mse_loss(outputs, inputs) + 0.1 * divergence
        run.record(loss)
        step(loss, optimizer)
    return model


class Checkpointed(nn.Module):
    """Computes its activations again in backward."""

    def __init__(self, *, reentrant: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
        self.last = nn.Linear(WIDTH, TARGETS)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.middle, self.first(inputs), use_reentrant=self.reentrant)
        outputs: Tensor = self.last(hidden)
        return outputs


@loop("gradient checkpointing")
def checkpointing(run: Run) -> Result:
    return trains(run, Checkpointed(reentrant=False))


@loop("gradient checkpointing, reentrant", reference=ALONE)
def reentrant(run: Run) -> Result:
    return trains(run, Checkpointed(reentrant=True, dropout=0.0))


@loop("torch.compile(model), called in place of the model: one graph")
def compiled(run: Run) -> Result:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    model, optimizer, net = begin(run)
    fast: Any = torch.compile(net, backend=backend) if net is model else net  # DDP compiles in a way of its own
    for loss in run.losses(fast):
        step(loss, optimizer)
    return model, len(graphs) if run.size == 1 else None


@loop("model.compile(), before the Trainer exists")
def compiled_in_place(run: Run) -> Result:
    network = mlp()
    network.compile(backend="eager")
    return trains(run, network)


NO_HOOKS = refused("takes no hooks")


@loop("a scripted model (torch.jit.script)", one=NO_HOOKS, sync=NO_HOOKS, collective=NO_HOOKS, relaxed=NO_HOOKS)
def scripted(run: Run) -> Result:
    with warnings.catch_warnings(action="ignore"):
        network = torch.jit.script(mlp())
    return trains(run, network)


@loop("a scripted model inside an nn.Module")
def scripted_inside(run: Run) -> Result:
    with warnings.catch_warnings(action="ignore"):
        network = nn.Sequential(torch.jit.script(mlp()))
    return trains(run, network)


@loop("a model with convolutions and pooling")
def convolutions(run: Run) -> Result:
    network = nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8, TARGETS),
    )
    return trains(run, network)


@loop("a residual network whose blocks are dropped at random (stochastic depth)")
def stochastic_depth(run: Run) -> Result:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
            self.last = nn.Linear(FEATURES, TARGETS)

        def forward(self, inputs: Tensor) -> Tensor:
            for block in self.blocks:
                if torch.rand(()) < 0.6:
                    inputs = inputs + torch.tanh(block(inputs))
            outputs: Tensor = self.last(inputs)
            return outputs

    return trains(run, Drops(), ddp={"find_unused_parameters": True})


@loop("a mixture of experts: each batch uses some of them")
def experts(run: Run) -> Result:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(FEATURES, 3)
            self.experts = nn.ModuleList(nn.Linear(FEATURES, TARGETS) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            weights = torch.softmax(self.gate(inputs), 1)
            chosen = weights.argmax(1)
            outputs = torch.zeros(len(inputs), TARGETS, dtype=inputs.dtype)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().squeeze(1)
                if len(rows):
                    outputs = outputs.index_add(0, rows, expert(inputs[rows]) * weights[rows, number, None])
            return outputs

    return trains(run, Experts(), ddp={"find_unused_parameters": True})
