"""Train a network on ImageNet, or on any images in RecordIO files or class folders.

    python train_imagenet.py --gpu 0 --batch-size 128 --network resnet-v1 --num-layers 50 --dtype float16 --benchmark 1
    python train_imagenet.py --gpus 0,1,2,3 --data-train train.rec --data-val val.rec --kv-store nccl_allreduce

`echelon data im2rec` packs folders of images into RecordIO files.
"""

from echelon.train import script

parser = script.make_parser(__doc__)
parser.set_defaults(
    # network
    network="resnet",
    num_layers=50,
    # data
    num_classes=1000,
    num_examples=1281167,
    image_shape="3,224,224",
    min_random_scale=1.0,
    # training
    batch_size=128,
    num_epochs=80,
    lr=0.1,
    lr_step_epochs="30,60",
)

if __name__ == "__main__":
    script.run(parser, data="imagenet")
