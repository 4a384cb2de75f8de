"""Fine-tune a trained network on other images: its last layer is replaced by a new one with the classes of the data.

    python fine-tune.py --pretrained-model runs/latest --gpus 0 --data-train train.rec --data-val val.rec
    python fine-tune.py --pretrained-model prefix --load-epoch 12 --data-train photos/train --data-val photos/val

The pretrained model is a checkpoint file, a run folder, MXNet's .params file, or the prefix of several files, of which
--load-epoch chooses one. Its network, image shape, mean and std are used, unless flags replace them. --model-prefix and
--resume are for the checkpoints of the new run.
"""

from echelon.train import script

parser = script.make_parser(__doc__)
parser.add_argument("--pretrained-model", help="the trained network: a checkpoint file, a run folder or a prefix")
parser.add_argument("--layer-before-fullc", default="flatten0", help="no effect: the last layer is found by its shape")
parser.set_defaults(
    # network
    network=None,
    # data
    image_shape="3,224,224",
    random_crop=1,
    random_mirror=1,
    # training: a small learning rate, and no regularization
    batch_size=128,
    num_epochs=30,
    lr=0.01,
    lr_step_epochs="20",
    wd=0.0,
    mom=0.0,
)

if __name__ == "__main__":
    script.run(parser, data="folder")
