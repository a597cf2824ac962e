"""The time of one optimizer step of Qwen3-0.6B by kernel, by torch's profiler; and only the head's kernels, for ncu.

    python benches/gpu/where.py                     # kernels by time, launch gaps, host waits, the head's share
    ncu --clock-control none --set roofline -k regex:"_statistics|_gradient" -c 4 python benches/gpu/where.py --head
    python benches/gpu/where.py --rehearse          # tiny, on a CPU

Writes where_<device>.json next to the other results, again after each part.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from arms import Problem, fused
from clock import replace_text, skipped
from models import OBJECTIVE, Place, adamw, model_of, passes, recorded_groups
from rehearsal import flex_attention_on_the_cpu
from tracegrad.trainer.step import optimizer_step
from waits import Waits

PEAK_FLOPS = 989e12  # dense bfloat16 of one H100 or H200, from its data sheet


def step_of(place: Place) -> tuple[Any, Any]:
    """A model and one optimizer step over it, as the row `trainer` has them."""
    traces, budget = recorded_groups(place, 16)
    return model_of("Qwen3-0.6B", place, torch.float32), traces.step(budget, True)


def profiled(place: Place) -> dict[str, Any]:
    """Device time by kernel over one complete step after two that compile, and idle time of the device."""
    model, step = step_of(place)
    optimizer = adamw(model, place)
    precision = torch.bfloat16 if place.as_cuda else torch.float32

    def run() -> None:
        optimizer_step(model, step, OBJECTIVE, optimizer, grad_clip=1.0, precision=precision)

    for _ in range(2):
        run()
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if place.cuda else [])]
    with torch.profiler.profile(activities=kinds) as seen:
        run()
        if place.cuda:
            torch.cuda.synchronize()
    return {"terms": len(step), **times(seen, place)}


def times(seen: Any, place: Place) -> dict[str, Any]:
    """Microseconds: busy and idle of the device between its first and last kernel, and the costliest kernels."""
    kind = torch.autograd.DeviceType.CUDA if place.cuda else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events() if e.device_type == kind)
    busy, idle, end = 0.0, 0.0, spans[0][0]
    for start, stop, _ in spans:
        idle += max(0.0, start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total: dict[str, float] = {}
    for start, stop, name in spans:
        total[name] = total.get(name, 0.0) + stop - start
    most = sorted(total.items(), key=lambda each: -each[1])[:25]
    return {"busy_us": busy, "idle_us": idle, "kernels": [{"name": name[:120], "us": us} for name, us in most]}


def host_waits(place: Place) -> dict[str, int]:
    """Calls that wait for the device in forward and backward of a step's rows; on CUDA with torch's own count."""
    model, step = step_of(place)
    run = passes(model, step, place)
    run()
    with Waits() as waits:
        run()
    found = dict(waits.seen)
    if place.cuda:
        from rows import waited

        found["torch's count"] = waited(run)
    return found


def head_alone(place: Place) -> dict[str, Any]:
    """One pass over the head of the row `head-narrow`: what ncu is pointed at; its share of the roofline by events."""
    rows = 64 if place.tiny else 32768
    problem = Problem.of(rows, 32 if place.tiny else 1024, place.vocabulary, place.device, False)

    def run() -> None:
        problem.hidden.grad = problem.weight.grad = None
        fused(problem).backward()

    for _ in range(2):
        run()
    if not place.cuda:
        return {"rows": rows}
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    ms = began.elapsed_time(ended)
    useful = 6 * problem.hidden.numel() * len(problem.weight)
    return {"rows": rows, "ms": ms, "share_of_peak": useful / (ms * 1e-3) / PEAK_FLOPS}


PARTS: dict[str, Callable[[Place], dict[str, Any]]] = {"head": head_alone, "step": profiled, "host_waits": host_waits}
"""Waits are counted last: attention is compiled once more under the mode that counts."""


def write_parts(place: Place, out: Path) -> None:
    """Measure each part, and write the file again after it: a part that fails or is ended leaves those before it."""
    device = torch.cuda.get_device_name() if place.cuda else "cpu rehearsal"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"where_{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__}
    for name, measure in PARTS.items():
        try:
            results[name] = measure(place)
        except Exception as error:
            results[name] = skipped(error)
        replace_text(path, json.dumps(results, indent=1) + "\n")
        print(name, json.dumps({key: value for key, value in results[name].items() if key != "kernels"}), flush=True)
    step = results["step"]
    if "kernels" in step:
        print(f"the device idles {step['idle_us'] / (step['busy_us'] + step['idle_us']):.1%} of a step")
    for each in step.get("kernels", []):
        print(f"{each['us'] / 1000:10.3f} ms  {each['name']}")
    print(path)
    if missing := [name for name in PARTS if "skipped" in results[name]]:
        sys.exit("did not run: " + ", ".join(missing))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    options.add_argument("--head", action="store_true", help="the head alone, for ncu")
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, by the roads of a GPU")
    return options


def main() -> None:
    options = parser().parse_args()
    cuda = torch.cuda.is_available() and not options.rehearse
    if not cuda and not options.rehearse:
        sys.exit("there is no CUDA device here. --rehearse runs tiny sizes on a CPU.")
    place = Place("cuda" if cuda else "cpu", options.rehearse, options.rehearse)
    with flex_attention_on_the_cpu() if options.rehearse else nullcontext():
        if options.head:
            print(json.dumps(head_alone(place)))
            return
        write_parts(place, options.out)


if __name__ == "__main__":
    main()
