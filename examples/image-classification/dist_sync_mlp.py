"""Train an MLP on MNIST on several workers in lock-step (`dist_sync`); each worker reads its own part of the data.

    echelon launch -n 2 -s 2 python dist_sync_mlp.py

The idx files are expected under data/.
"""

from echelon.train import script

parser = script.make_parser(__doc__, images=False)
parser.own("--data-dir", default="data", help="folder of the idx files")
parser.own("--num-examples", type=int, help="examples per epoch, over all workers")
parser.set_defaults(
    network="mlp",
    kv_store="dist_sync",
    num_classes=10,
    num_examples=60000,
    image_shape="1,28,28",
    batch_size=100,
    num_epochs=10,
    lr=0.1,
)

if __name__ == "__main__":
    script.run(parser, data="mnist")
