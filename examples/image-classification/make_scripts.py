"""Write the scripts SCHEME_DATASET_MODEL.sh of this folder, for example gsp_cifar10_inception_small.sh.

    python make_scripts.py

There is one script per scheme and per row of `ROWS`. All come from `TEMPLATE`, so change them here. Environment
variables replace the values of a script, and arguments are appended to its command:

    NUM_EPOCHS=1 INTERFACE=ib0 ./gsp_cifar10_inception_small.sh --disp-batches 5
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

TEMPLATE = """\
#!/usr/bin/env bash
# {title} on {dataset} under {name} ({store}). Written by make_scripts.py.
# The files are explained in docs/how-to/launch.md: hosts{files}.
set -euo pipefail
cd "$(dirname "$0")"
epochs="${{NUM_EPOCHS:-{num_epochs}}}"
allocator="${{DATA_ALLOCATOR:-{data_allocator}}}"
sharding=""
[ "$allocator" = 0 ] || sharding="${{DATA_SHARDING:-data_sharding}}"
exec echelon launch \\
  -n "${{NUM_WORKERS:-3}}" \\
  -s "${{NUM_SERVERS:-3}}" \\
  -i "${{INTERFACE:-eth0}}" \\
  --launcher "${{LAUNCHER:-ssh}}" \\
  -H "${{HOSTS:-hosts}}" \\
  {groups}${{sharding:+--data-sharding "$sharding"}} \\
  python {script} \\
  {network} \\
  --data-dir "${{DATA_DIR:-data}}" \\
  --batch-size "${{BATCH_SIZE:-{batch_size}}}" \\
  --lr "${{LR:-{lr}}}" \\
  --lr-factor "${{LR_FACTOR:-{lr_factor}}}" \\
  --lr-step-epochs "${{LR_STEP_EPOCHS:-{lr_steps}}}" \\
  --num-epochs "$epochs" \\
  --num-examples "${{NUM_EXAMPLES:-{num_examples}}}" \\
  ${{GPUS:+--gpus "$GPUS"}} \\
  --kv-store {store} \\
  --data-allocator "$allocator" \\
  {staleness}"$@"
"""
EVERY_EPOCH = '$(seq -s , "$epochs")'


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme: its store, its flags, and the files that the launcher reads besides hosts."""

    name: str
    store: str
    data_allocator: int = 0
    groups: str = ""
    staleness: str = ""
    files: str = ", and data_sharding with DATA_ALLOCATOR=1"


@dataclass(frozen=True, slots=True)
class Row:
    """A network on a data set. The values are those of MXNet-G's scripts where it has one."""

    dataset: str
    model: str  # in the name of the script
    title: str
    network: str
    batch_size: int
    lr: float
    num_epochs: int
    num_examples: int
    lr_factor: float = 0.94
    lr_steps: str = EVERY_EPOCH

    @property
    def script(self) -> str:
        """The training script."""
        return {"MNIST": "train_mnist.py", "ImageNet": "train_imagenet.py"}.get(self.dataset, "train_cifar10.py")


SCHEMES = {
    "bsp": Scheme("BSP", "dist_sync"),
    "asp": Scheme("ASP", "dist_async"),
    "ssp": Scheme("SSP", "dist_ssync", staleness='--staleness "${STALENESS:-3}" \\\n  '),
    "gsp": Scheme(
        "GSP",
        "dist_gsync",
        data_allocator=1,
        groups='--groups "${GROUPS_FILE:-groups}" \\\n  ',
        staleness='${STALENESS:+--staleness "$STALENESS"} \\\n  ',
        files=", groups and data_sharding",
    ),
}
ROWS = [
    Row("MNIST", "mlp", "A perceptron", "--network mlp", 64, 0.05, 10, 60000),
    Row("MNIST", "lenet", "LeNet", "--network lenet", 64, 0.05, 10, 60000),
    Row("CIFAR10", "inception_small", "Inception-BN small", "--network inception-bn-28-small", 45, 0.1, 60, 50000),
    Row("CIFAR10", "resnet20", "ResNet-20", "--network resnet --num-layers 20", 25, 0.05, 400, 50000, 0.1, "200,300"),
    Row(
        "CIFAR10", "resnet164", "ResNet-164", "--network resnet --num-layers 164", 20, 0.05, 300, 50000, 0.1, "150,225"
    ),
    Row("ImageNet", "inception", "Inception-BN", "--network inception-bn", 30, 0.5, 200, 1281167, 0.98),
    Row(
        "ImageNet", "resnet34", "ResNet-34", "--network resnet --num-layers 34", 30, 0.1, 100, 1281167, 0.1, "30,60,90"
    ),
    Row(
        "ImageNet", "resnet50", "ResNet-50", "--network resnet --num-layers 50", 30, 0.1, 100, 1281167, 0.1, "30,60,90"
    ),
]


def scripts() -> dict[str, str]:
    """Return the text of every script, by its name."""
    return {
        f"{key}_{row.dataset.lower()}_{row.model}.sh": TEMPLATE.format(
            title=row.title,
            dataset=row.dataset,
            name=scheme.name,
            store=scheme.store,
            files=scheme.files,
            script=row.script,
            network=row.network,
            batch_size=row.batch_size,
            lr=row.lr,
            lr_factor=row.lr_factor,
            lr_steps=row.lr_steps,
            num_epochs=row.num_epochs,
            num_examples=row.num_examples,
            data_allocator=scheme.data_allocator,
            groups=scheme.groups,
            staleness=scheme.staleness,
        )
        for key, scheme in SCHEMES.items()
        for row in ROWS
    }


if __name__ == "__main__":
    for name, text in scripts().items():
        path = FOLDER / name
        path.write_text(text)
        path.chmod(0o755)
