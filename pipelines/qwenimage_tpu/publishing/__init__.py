"""`qwenimage-tpu publish`: the kernels of this clone to the Hub, as a version that loads or not at all."""
