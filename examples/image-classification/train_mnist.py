"""Train a network on MNIST's handwritten digits.

    python train_mnist.py                              # an MLP on the CPU
    python train_mnist.py --network lenet --gpus 0
    echelon launch -n 2 -s 2 python train_mnist.py --kv-store dist_sync

The idx files (train-images-idx3-ubyte.gz and the three others) are expected under data/.
"""

from echelon.train import script

parser = script.make_parser(__doc__, images=False)
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--num-examples", type=int, default=60000, help="examples per epoch, over all workers")
parser.add_argument("--image_shape", default="1, 28, 28", help="channels, height, width")
parser.add_argument("--add_stn", action="store_true", help="add a spatial transformer to lenet")
parser.own("--data-dir", default="data", help="folder of the idx files")
parser.set_defaults(
    network="mlp",
    batch_size=64,
    num_epochs=20,
    lr=0.05,
    lr_step_epochs="10",
    disp_batches=100,
)

if __name__ == "__main__":
    script.run(parser, data="mnist")
