"""Profiles of VGG-16 and ResNet-50 for PipeDream's partitioner, from their shapes."""

from meshpar.methods.pipedream.partitioner import LayerProfile


def vgg16(flops: float, rows: int = 64) -> list[LayerProfile]:
    """Convolutions, each with the pooling behind it, and dense layers; float32."""
    layers, side, last = [], 224, 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for index in range(count):
            weights, work = 9 * last * width, 9 * last * width * side**2
            last = width
            side //= 2 if index == count - 1 else 1
            layers.append(_layer(flops, rows, work, side**2 * width, weights))
    for size in (4096, 4096, 1000):
        weights = (side**2 * last) * size
        layers.append(_layer(flops, rows, weights, size, weights))
        side, last = 1, size
    return layers


def resnet50(flops: float, rows: int = 128) -> list[LayerProfile]:
    """A first convolution, 16 blocks and a dense layer; float32."""
    first = 49 * 3 * 64
    layers = [_layer(flops, rows, first * 112**2, 56**2 * 64, first)]
    last, side = 64, 56
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            inner = side // (2 if index == 0 and width > 64 else 1)
            out = 4 * width
            shortcut = last * out if index == 0 else 0
            weights = last * width + 9 * width**2 + width * out + shortcut
            work = last * width * side**2 + (weights - last * width) * inner**2
            last, side = out, inner
            layers.append(_layer(flops, rows, work, side**2 * out, weights))
    return [*layers, _layer(flops, rows, last * 1000, 1000, last * 1000)]


def _layer(
    flops: float, rows: int, multiplications: int, outputs: int, weights: int
) -> LayerProfile:
    """A backward pass is twice a forward pass, of two FLOPs per multiplication."""
    seconds = 3 * 2 * rows * multiplications / flops
    return LayerProfile(seconds, 4.0 * rows * outputs, 4.0 * weights)
