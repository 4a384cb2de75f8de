"""Train a network on CIFAR-10. The 32x32 images are padded by 4, cropped to 28x28 at random, and mirrored at random.

    python train_cifar10.py --gpus 0                   # ResNet-110
    python train_cifar10.py --gpus 0,1,2,3 --num-epochs 12 --network resnet --num-layers 50 --batch-size 256 --lr=0.2
    echelon launch -n 2 -s 2 python train_cifar10.py --network resnet --num-layers 20 --kv-store dist_sync

Data: data/cifar10_train.rec and data/cifar10_val.rec, or the published binary or python files under data/.
"""

from echelon.train import script

parser = script.make_parser(__doc__)
parser.set_defaults(
    # network
    network="resnet",
    num_layers=110,
    # data
    num_classes=10,
    num_examples=50000,
    image_shape="3,28,28",
    pad_size=4,
    random_crop=1,
    random_mirror=1,
    # training
    batch_size=128,
    num_epochs=300,
    lr=0.05,
    lr_step_epochs="200,250",
    ema_epochs=1.0,
)

if __name__ == "__main__":
    script.run(parser, data="cifar10")
