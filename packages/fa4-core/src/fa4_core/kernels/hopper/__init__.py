"""Our kernel for Hopper (sm_90a): paged prefill, warp-specialised, TMA and WGMMA, in CuTe DSL."""

from .launch import HopperKernel

__all__ = ["HopperKernel"]
