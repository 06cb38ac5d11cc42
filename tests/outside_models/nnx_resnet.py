"""A residual network in NNX after its tutorials: batch normalization in a list."""

from flax import nnx
from outside_models.linen_resnet import CLASSES
from outside_models.linen_resnet import make_batch as make_batch
from outside_models.nnx_vit import loss_fn as loss_fn


class ResNetBlock(nnx.Module):
    def __init__(self, inputs, filters, strides, *, rngs):
        def conv(inputs, size, strides):
            kernel = dict(kernel_size=(size, size), strides=(strides, strides))
            return nnx.Conv(inputs, filters, **kernel, use_bias=False, rngs=rngs)

        self.conv1, self.conv2 = conv(inputs, 3, strides), conv(filters, 3, 1)
        self.bn1, self.bn2 = (
            nnx.BatchNorm(filters, momentum=0.9, rngs=rngs) for _ in range(2)
        )
        self.shortcut = conv(inputs, 1, strides) if inputs != filters else None

    def __call__(self, x):
        y = nnx.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, filters=8, *, rngs):
        self.conv = nnx.Conv(3, filters, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(filters, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List(
            [
                ResNetBlock(filters, filters, 1, rngs=rngs),
                ResNetBlock(filters, 2 * filters, 2, rngs=rngs),
            ]
        )
        self.head = nnx.Linear(2 * filters, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
