"""Faults between an online run and a real vLLM, and the cause that the check of weights names for each.

    python benches/online/faults.py --vllm-python .venv-vllm/bin/python --page docs/explanation/benchmarks.md

One server for float32 and one for bfloat16; two seeds of each fault, and one clean run. Writes the table into the page.
"""

import argparse
import tempfile
from pathlib import Path

from machine import MODEL, keep, row

from fault_proxy import FAULTS  # isort: skip
from fault_runs import played  # isort: skip
from page_table import put_table  # isort: skip
from tracegrad.rollout.launch import launch
from tracegrad.weight_sync import vllm_arguments

COMMAND = "python benches/online/faults.py --vllm-python .venv-vllm/bin/python --out benches/results/faults.json"


def main() -> int:
    """Run every fault, print the named cause, and write the table; 1 if a fault was not named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--faults", nargs="*", default=[*FAULTS])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="Markdown whose table is written anew")
    told = parser.parse_args()
    rows, cells = [], {}
    with tempfile.TemporaryDirectory() as place:
        for dtype in told.dtypes:
            folder = Path(place) / dtype
            folder.mkdir()
            flags, environment = vllm_arguments("file", package_folder=folder / "beside")
            flags += ["--enforce-eager", "--dtype", dtype, "--max-model-len", "1024", "--generation-config", "vllm"]
            flags += ["--logprobs-mode", "processed_logprobs", "--trust-request-chat-template"]
            flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
            more = {"name": "clerk", "arguments": flags, "environment": environment, "log_path": folder / "server.log"}
            with launch(told.vllm_python, MODEL, **more) as server:
                for seed in range(told.seeds):
                    for number, fault in enumerate(told.faults):
                        seen = played(server.url, fault, folder / f"{seed}-{number}", dtype=dtype, seed=seed)
                        verdict = "named" if seen.named else "silent" if seen.steps else "found, not named"
                        where = f"step {seen.step}" if seen.step else "in a line" if seen.steps else "before a step"
                        cells.setdefault(fault, []).append(f"{verdict}, {where}")
                        about = {"verdict": verdict, "step": seen.step}
                        rows.append(row(f"fault: {fault}, {dtype}, seed {seed}", COMMAND, **about))
                        print(f"{dtype} {seed} {fault}: {verdict}, {where}", flush=True)
                        if not seen.named:
                            print(f"    {seen.said[-900:]}", flush=True)
                if dtype == "bfloat16":
                    seen = played(server.url, None, folder / "precision", dtype="float32")
                    named = "most likely compute in bfloat16" in seen.said
                    cells["float32 trainer, bfloat16 server"] = ["named" if named else "not named"]
                    print(f"float32 trainer, bfloat16 server: {named}", flush=True)
                clean = played(server.url, None, folder / "clean", dtype=dtype, steps=6)
                print(f"{dtype} clean: {clean.steps} of 6 steps", flush=True)
    keep(told.out, rows)
    if told.page:
        heads = [f"{dtype}, seed {seed}" for dtype in told.dtypes for seed in range(told.seeds)]
        lines = [f"| fault | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        lines += [f"| {fault} | {' | '.join(found)} |" for fault, found in cells.items()]
        put_table(told.page, "faults", lines)
    return int(any(each["verdict"] != "named" for each in rows))


if __name__ == "__main__":
    raise SystemExit(main())
