"""QwenImage on Cloud TPU: load, patch and run diffusers' QwenImagePipeline with our Pallas kernels.

Importing this package costs nothing; each module imports torch, jax or diffusers by itself.
"""
