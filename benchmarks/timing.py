"""Timing on a GPU: medians of CUDA events, inputs rotated past the L2; the card's copy bandwidth and matrix rate."""

import statistics

import torch

L2_BYTES = 60 << 20


def card():
    """What floors are made of: a copy of 4 GiB, counting bytes read and written; 8192^3 products in bf16 and FP8."""
    a, b = torch.randint(255, (2, 4 << 30), dtype=torch.uint8, device="cuda")
    copy = events_ms(lambda: a.copy_(b))
    x, y = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = median_ms([lambda: x @ y])
    rates = {"copy_bytes_s": 2 * a.numel() / copy * 1e3, "matrix_flops_s": 2 * 8192**3 / product * 1e3}
    if torch.cuda.get_device_capability() >= (8, 9):
        x, y, one = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).T, torch.ones((), device="cuda")
        product = median_ms([lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)])
        rates["fp8_flops_s"] = 2 * 8192**3 / product * 1e3
    return rates


def sets_for(nbytes):
    """How many sets of inputs of so many bytes to rotate among, so that none is in the L2 at its turn; at most 1500:
    sets below 120 kB stay in it.
    """
    return min(1500, -(-3 * L2_BYTES // max(nbytes, 1)))


def median_ms(calls, repeats=20, warmup=3):
    """Median over `repeats` rounds of the time of one call; calls: functions without arguments, run in turn.

    A round is one CUDA graph of all calls, so that no launch waits for the host.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return events_ms(graph.replay, repeats) / len(calls)


def events_ms(call, repeats=20, warmup=2):
    """Median of the time of one call, launched from the host."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
