"""What differs between GPUs: options of a launch that only NVIDIA's take (empty elsewhere), and FP8."""

import functools

import torch

import kernels


def registers(n):
    """A limit of registers per thread, for more programs per multiprocessor."""
    return {} if torch.version.hip or kernels.interpreted() else dict(maxnreg=n)


@functools.cache
def overlap(device):
    """For a kernel that starts before the one ahead of it has ended: half the cost of a launch.

    NVIDIA calls it programmatic dependent launch and has it since Hopper. The kernel ahead says
    `gdc_launch_dependents()` first of all; this one loads what is older than that kernel, and then says `gdc_wait()`,
    which waits for its end. Where this is empty, neither may be said.
    """
    there = not kernels.interpreted() and torch.version.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if there else {}


def no_fp8(x):
    """Why the GPU of x has no FP8, or None."""
    old = x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) < (8, 9)
    return "FP8 on a GPU older than compute capability 8.9" if old else None
