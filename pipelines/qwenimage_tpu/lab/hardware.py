"""What a device of each TPU generation has, as jax counts devices: on v5p a chip, on tpu7x one core."""

from qwenimage_tpu_pallas.devices import TARGETS

# jax's names of the devices: of each generation's names the first.
DEVICE_KINDS = {target.generation: kind for kind, target in reversed(TARGETS.items())}

# A v5p chip is one device of two TensorCores ("megacore"), which run the same program: a Pallas kernel's
# first "parallel" grid dimension is split over them; a kernel without one runs on core 0 while core 1 waits.
# A tpu7x chip has two TensorCores as well, but each is a device of its own.
CORES = {target.generation: target.cores for target in TARGETS.values()}

# Of a device, shared by its cores. From "System architecture" of each generation in Google Cloud's TPU
# documentation (docs.cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x): 819, 2765, 1640 (1638 in some
# tables) and 7380 GB/s per chip; half of the last for each of its two devices.
HBM_BYTES_PER_SECOND = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "tpu7x": 3690e9}
