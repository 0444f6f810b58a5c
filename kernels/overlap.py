"""Small kernels in a row, each of which starts before the one ahead of it has ended: half the cost of a launch.

NVIDIA calls it programmatic dependent launch and has it since Hopper. The kernel ahead says `gdc_launch_dependents()`
first of all, the next one loads what is older than that kernel and then says `gdc_wait()`, which waits for its end.
"""

import functools

import torch

import kernels


@functools.cache
def overlap(device):
    """Launch options of a kernel that says `gdc_wait()`; empty where there is no such thing, and none may say it."""
    there = not kernels.interpreted() and torch.version.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if there else {}
