"""Kernels compiled ahead of time: a folder of shared libraries that need nothing but tvm-ffi and a driver.

`python -m fa4_core.kernels.hopper.objects --out DIR` makes it; no GPU is needed.
"""
