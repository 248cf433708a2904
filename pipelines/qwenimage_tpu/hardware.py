"""What a device of each TPU generation has, as jax counts devices: on v5p a chip, on tpu7x one core."""

# jax's names of the devices.
DEVICE_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}

# A v5p chip is one device of two TensorCores ("megacore"), which run the same program: a Pallas kernel's
# first "parallel" grid dimension is split over them; a kernel without one runs on core 0 while core 1 waits.
# A tpu7x chip has two TensorCores as well, but each is a device of its own.
CORES = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}

# Of a device, shared by its cores. From "System architecture" of each generation in Google Cloud's TPU
# documentation (docs.cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x): 819, 2765, 1640 (1638 in some
# tables) and 7380 GB/s per chip; half of the last for each of its two devices.
HBM_BYTES_PER_SECOND = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "tpu7x": 3690e9}
